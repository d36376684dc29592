"""Full tensors from what a rank has of them, and back: shares of replicas, and parts of ranks that split tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

from weft.torch import tensor_parallel
from weft.torch.tensors.shards import stays_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """True if this rank has only a share of the tensor, and replicas have the others."""
    return stays_sharded(tensor)


def share_of(value: Tensor) -> Tensor:
    """This rank's share of a tensor, or all of it."""
    return value.to_local() if is_sharded(value) else value


def full_tensor(value: Tensor, of: Tensor | None = None) -> Tensor:
    """All of a tensor; collective over the ranks that have the rest of it.

    ``of``: the parameter that the tensor belongs to (as its gradient, or a state of an optimizer); it says how both
    are cut. The tensor itself, if not given.
    """
    if is_sharded(value):
        return value.full_tensor()
    parameter = value if of is None else of
    return tensor_parallel.full_tensor(parameter, value) if tensor_parallel.is_cut(parameter) else value


def like(value: Any, target: Tensor) -> Any:
    """This rank's shard of a tensor, which every rank has whole, cut as ``target`` is; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    how = tensor_parallel.cut_of(target)
    if how is not None:
        return tensor_parallel.cut(value, target) if tuple(value.shape) == how.shape else value
    if not is_sharded(target) or is_sharded(value) or value.shape != target.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # loaded, as there is a DTensor

    moved = value.to(target.device)
    return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)
