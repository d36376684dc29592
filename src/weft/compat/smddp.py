"""``init_process_group(backend="smddp")`` without an import from the original, which needs a registered backend."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch.distributed as dist

_installed = False


def install() -> None:
    """Let ``init_process_group`` bring in weft's backend when it is asked for ``smddp``; once for the process."""
    global _installed
    if _installed or not dist.is_available():
        return
    _installed = True
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[0] if args else None)
        if backend == "smddp":
            register()
        return original(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def register() -> None:
    """Make ``smddp`` a backend of ``torch.distributed``."""
    importlib.import_module("weft.torch.data_parallel")
