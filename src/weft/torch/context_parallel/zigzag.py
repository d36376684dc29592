"""PyTorch's rules for sharded tensors, where each rank's positions are in zigzag blocks of a sequence.

PyTorch takes a ``DTensor``'s parts for blocks behind each other. For what it computes on parts alone that does not
matter: it knows one from the other only where full tensors become parts (biases, masks, rotary tables) or parts whole.
All of that goes through one function, which weft answers for the groups that deal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from weft.torch.pytorch.private_dtensor import redistribute_by
from weft.torch.tensor_parallel.rules import Unsplittable
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensors.marks import WINDOW
from weft.torch.tensors.pytree import tensors_in
from weft.torch.tensors.shards import ShardPositions

_shard_groups: WeakValueDictionary[str, ShardGroup] = WeakValueDictionary()


def fits_zigzag(total: int, ranks: int) -> bool:
    """True if so many positions make two equal blocks for each rank."""
    return total % (2 * ranks) == 0


def zigzag(total: int, ranks: int) -> ShardPositions:
    """Positions in blocks from both ends.

    Raises:
        Unsplittable: There are no equal blocks.
    """
    if not fits_zigzag(total, ranks):
        raise Unsplittable(f"sees {total} positions, which do not make {2 * ranks} blocks")
    return ShardPositions.zigzag(total, ranks)


def register_zigzag(shard_group: ShardGroup) -> None:
    """From now on full tensors and the group's parts become each other as the group deals them."""
    if not _shard_groups:
        redistribute_by(_redistributed)
    _shard_groups[shard_group.name] = shard_group


def check_blocks(result: Any, shard_group: ShardGroup) -> None:
    """See that what a function has made of blocks are blocks again: windows of positions may be larger.

    Raises:
        Unsplittable: They are not.
    """
    for each in tensors_in(result):
        computed = getattr(each, WINDOW) is None
        if computed and isinstance(each, DTensor) and not each.placements[0].is_replicate():
            _positions(each.placements[0], each.shape, shard_group)


def _positions(placement: Any, shape: Any, shard_group: ShardGroup) -> ShardPositions | None:
    """The positions of each rank along the sharded dimension; None for partial sums."""
    if placement.is_partial():
        return None
    times = getattr(placement, "split_factor", 1)  # sequences seen as one dimension
    return shard_group.positions(shape[placement.dim] // times).repeated(times)


def _redistributed(plain: Callable[..., Tensor], local: Tensor, before: Any, after: Any) -> Tensor:
    names = before.mesh.mesh_dim_names
    shard_group = None if names is None else _shard_groups.get(names[0])
    if shard_group is None or before.placements == after.placements:
        return plain(local, before, after)
    if len(before.placements) == 2:
        return _own_on_mesh_2d(local, before, after, shard_group)
    (old,), (new,) = before.placements, after.placements
    for each in (old, new):
        if not (each.is_replicate() or each.is_partial()):
            _positions(each, before.shape, shard_group)
    if shard_group.group is None:  # ranks that are not there: what is sent is counted
        return plain(local, before, after)
    full = type(before)(before.mesh, (Replicate(),), tensor_meta=before.tensor_meta)
    if old.is_partial():
        local = plain(local, before, full)
    elif not old.is_replicate():
        positions = _positions(old, before.shape, shard_group)
        assert positions is not None
        local = positions.joined(shard_group.gather(local, old.dim, positions.sizes), old.dim)
    if new.is_partial():
        return plain(local, full, after)
    if new.is_replicate():
        return local
    positions = _positions(new, before.shape, shard_group)
    assert positions is not None
    return positions.own(local, new.dim, shard_group.rank).contiguous()


def _own_on_mesh_2d(local: Tensor, before: Any, after: Any, shard_group: Any) -> Tensor:
    """Of a tensor that is whole this rank's positions, and its heads, which are behind each other.

    Raises:
        Unsplittable: There is more to be done.
    """
    (old, old_heads), (new, new_heads) = before.placements, after.placements
    if (old != new and not (old.is_replicate() and new.is_shard())) or (
        old_heads != new_heads and not (old_heads.is_replicate() and new_heads.is_shard())
    ):
        raise Unsplittable("takes whole sequences, or all heads")
    if old != new:
        positions = _positions(new, before.shape, shard_group)
        assert positions is not None
        local = positions.own(local, new.dim, shard_group.rank)
    if old_heads != new_heads:
        count = local.shape[new_heads.dim] // shard_group.heads.size
        local = local.narrow(new_heads.dim, shard_group.heads.rank * count, count)
    return local.contiguous()
