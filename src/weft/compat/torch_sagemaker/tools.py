"""Small functions of the second version: norms, times, logs, groups and folders of checkpoints."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weft.errors import ConfigError


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of a model, which are scaled down to ``max_norm`` if it is larger."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm, norm_type)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            f"clip_grad_norm_ got a {type(model).__name__} with FSDP modules inside, whose norm no rank has "
            "whole: give it the outermost FSDP module"
        )
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def get_logger() -> logging.Logger:
    """The logger ``torch.sagemaker``, which writes from INFO on."""
    logger = logging.getLogger("torch.sagemaker")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


@contextmanager
def timeit(condition: bool, name: str, rank: int | None = None) -> Iterator[None]:
    """A context whose seconds are logged, if ``condition`` holds."""
    began = time.perf_counter()
    yield
    if condition:
        who = "" if rank is None else f"[rank {rank}] "
        get_logger().info("%s%s: %.3f s", who, name, time.perf_counter() - began)


def get_global_ranks(process_group: Any = None) -> list[int]:
    """The ranks of a group, in its order, as they are numbered in the whole job."""
    return dist.get_process_group_ranks(dist.group.WORLD if process_group is None else process_group)


def SORT_BY_LAST_INT(name: str | os.PathLike[str]) -> int:
    """The last whole number in a folder's name, which orders checkpoints by their steps; -1 without one."""
    numbers = re.findall(r"\d+", Path(name).name)
    return int(numbers[-1]) if numbers else -1


def limit_num_subdirs(
    path: str | os.PathLike[str],
    max_num: int,
    sort_fn: Callable[[Any], Any] = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: bool = False,
) -> None:
    """Delete the first of a folder's folders, so that at most ``max_num`` stay; call it on one rank.

    Args:
        path: The folder.
        max_num: How many stay.
        sort_fn: Gives the order from a folder's name.
        regex: Only folders whose names match count, and are deleted.
        log: Whether it is logged what is deleted.
    """
    if max_num < 1:
        raise ConfigError(f"limit_num_subdirs got {max_num} folders to keep: give a number from 1 on")
    folders = [
        folder
        for folder in Path(path).iterdir()
        if folder.is_dir() and not folder.is_symlink() and (regex is None or re.match(regex, folder.name))
    ]
    for folder in sorted(folders, key=lambda folder: sort_fn(folder.name))[:-max_num]:
        if log:
            get_logger().info("deleting %s", folder)
        shutil.rmtree(folder)
