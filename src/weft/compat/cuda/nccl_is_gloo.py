"""``torch.distributed`` on a machine without CUDA, for scripts that say NCCL.

init_process_group("nccl"), new_group(backend="nccl")    weft's backend: gloo, with averages
barrier(device_ids=[0])                                  without device_ids
is_nccl_available()                                      with --device cpu: true for scripts
"""

from __future__ import annotations

import atexit
import functools
import warnings
from typing import Any

import torch.distributed as dist

from weft.compat.cuda.names import asked_by_script
from weft.compat.dataparallel.smddp import register
from weft.launch.rendezvous import let_go

BACKEND = "weft"


def install(pretend: bool) -> None:
    """Put the meanings in place. ``pretend``: scripts see NCCL."""
    begin, group, wait, there = dist.init_process_group, dist.new_group, dist.barrier, dist.is_nccl_available

    @functools.wraps(begin)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _is_nccl(backend):
            warnings.warn("there is no CUDA here: the backend nccl means gloo", stacklevel=2)
            register()
            backend = BACKEND
            atexit.register(let_go)  # scripts leave NCCL's groups to the end of the process
        kwargs.pop("device_id", None)
        return begin(backend, *args, **kwargs)

    @functools.wraps(group)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if _is_nccl(backend):
            register()
            backend = BACKEND
        kwargs.pop("device_id", None)
        return group(ranks, timeout, backend, *args, **kwargs)

    @functools.wraps(wait)
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return wait(group, async_op)

    @functools.wraps(there)
    def is_nccl_available() -> bool:
        return (pretend and asked_by_script()) or there()

    for function in (init_process_group, new_group, barrier, is_nccl_available):
        name = function.__name__
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


def _is_nccl(backend: Any) -> bool:
    return isinstance(backend, str) and "nccl" in backend.lower()
