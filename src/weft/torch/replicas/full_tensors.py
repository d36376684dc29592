"""Full tensors from what a rank has of them, and back: shares of replicas, and parts of ranks that split tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.torch import tensor_parallel


def is_sharded(tensor: Any) -> bool:
    """True if this rank has only a share of the tensor, and replicas have the others."""
    return isinstance(tensor, DTensor)


def share_of(value: Tensor) -> Tensor:
    """This rank's share of a tensor, or all of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def full_tensor(value: Tensor, of: Tensor | None = None) -> Tensor:
    """All of a tensor; collective over the ranks that have the rest of it.

    ``of``: the parameter that the tensor belongs to (as its gradient, or a state of an optimizer); it tells how both
    are cut. The tensor itself, if not given.
    """
    if isinstance(value, DTensor):
        return value.full_tensor()
    parameter = value if of is None else of
    return tensor_parallel.full_tensor(parameter, value) if tensor_parallel.is_cut(parameter) else value


def like(value: Tensor, target: Tensor) -> Tensor:
    """This rank's shard of ``value``, which every rank has whole, cut as ``target`` is."""
    how = tensor_parallel.cut_of(target)
    if how is not None:
        return tensor_parallel.cut(value, target) if tuple(value.shape) == how.shape else value
    if not isinstance(target, DTensor) or isinstance(value, DTensor) or value.shape != target.shape:
        return value
    moved = value.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)
