"""``init_process_group`` of scripts that import nothing from the original.

The backend ``smddp`` has to be registered, and its replicas' buffers go as ``buffers`` says. Under ``weft run`` and
mpirun ranks are found without ``MASTER_ADDR``, whatever the backend.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from weft.launch.discovery import master_given

BACKEND = "smddp"
_installed = False


def install() -> None:
    """Let ``init_process_group`` bring in weft's backend and rendezvous where they are needed; once for the process."""
    global _installed
    import torch.distributed as dist  # not above: a script may import this file first, and then torch calls back

    from weft.compat.modelparallel import buffers

    if _installed or not dist.is_available():
        return
    _installed = True
    buffers.install((BACKEND,))
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend", args[0] if args else None)
        source = kwargs.get("store") or kwargs.get("init_method") or master_given(os.environ)
        if backend == BACKEND or (not source and len(args) < 2):
            register()
        return original(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group


def register() -> None:
    """Make ``smddp`` a backend of ``torch.distributed``, and let the ranks find each other under every launcher."""
    import weft.torch.data_parallel  # noqa: F401 (importing it registers)
