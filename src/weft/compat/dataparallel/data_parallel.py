"""The older style of ``smdistributed.dataparallel``: functions and a ``DistributedDataParallel`` of its own.

They stand on ``torch.distributed``, whose default group has all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import group
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from weft.compat.dataparallel.smddp import register
from weft.errors import LaunchError, UsageError
from weft.untrusted import MOST_RANKS, shown_text, whole

__all__ = [
    "DistributedDataParallel", "ReduceOp", "all_gather", "all_reduce", "all_to_all_single", "barrier", "broadcast",
    "get_local_rank", "get_rank", "get_world_size", "group", "init_process_group", "is_available", "is_initialized",
]  # fmt: skip


class ReduceOp:
    """The reductions of tensors over ranks."""

    AVERAGE = "average"
    SUM = dist.ReduceOp.SUM
    MIN = dist.ReduceOp.MIN
    MAX = dist.ReduceOp.MAX
    PRODUCT = dist.ReduceOp.PRODUCT


def is_available() -> bool:
    """True if this process was started as one of several."""
    return "RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def init_process_group(*ignored: Any, **also_ignored: Any) -> None:
    """Join the other processes. All arguments are ignored, as in the original."""
    if not dist.is_initialized():
        register()
        dist.init_process_group(backend="smddp")


def is_initialized() -> bool:
    """True if :func:`init_process_group` has been called."""
    return dist.is_initialized()


def get_world_size(group: Any = None) -> int:
    """The number of processes."""
    return dist.get_world_size(_only_world(group))


def get_rank(group: Any = None) -> int:
    """This process's number among all."""
    return dist.get_rank(_only_world(group))


def get_local_rank() -> int:
    """This process's number on its host."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK"):
        if name in os.environ:
            value = whole(os.environ[name], MOST_RANKS)
            if value is None:
                raise LaunchError(f'{name} is "{shown_text(os.environ[name])}": it must be a whole number')
            return value
    return get_rank()


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """``tensor`` becomes the sum (or average, least, largest) over all processes; a handle if ``async_op``."""
    if op != ReduceOp.AVERAGE:
        return dist.all_reduce(tensor, op, _only_world(group), async_op)
    if async_op:
        tensor /= get_world_size()
        return dist.all_reduce(tensor, dist.ReduceOp.SUM, _only_world(group), True)
    dist.all_reduce(tensor, dist.ReduceOp.SUM, _only_world(group))
    tensor /= get_world_size()
    return None


def broadcast(tensor: Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Any:
    """``tensor`` of process ``src``, on all."""
    return dist.broadcast(tensor, src, _only_world(group), async_op)


def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """The tensors of all processes, in ``tensor_list``."""
    return dist.all_gather(tensor_list, tensor, _only_world(group), async_op)


def all_to_all_single(
    output_t: Tensor,
    input_t: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Each process gets a part of every other's tensor."""
    outputs = list(output_split_sizes) if output_split_sizes is not None else None
    inputs = list(input_split_sizes) if input_split_sizes is not None else None
    return dist.all_to_all_single(output_t, input_t, outputs, inputs, _only_world(group), async_op)


def barrier(group: Any = None, async_op: bool = False) -> Any:
    """Wait for all processes."""
    return dist.barrier(_only_world(group), async_op)


def _only_world(given: Any) -> Any:
    if given is None or given is group.WORLD:
        return None
    raise UsageError("only group.WORLD is supported here, as in the original: leave group out")


class DistributedDataParallel(TorchDistributedDataParallel):
    """PyTorch's own; ``bucket_cap_mb=None`` means 25."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: int | None = None,
        **others: Any,
    ) -> None:
        if not torch.cuda.is_available():
            device_ids = output_device = None
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            process_group=_only_world(process_group),
            bucket_cap_mb=25 if bucket_cap_mb is None else bucket_cap_mb,
            **others,
        )
