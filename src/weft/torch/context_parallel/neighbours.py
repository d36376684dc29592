"""Blocks of positions with those beside them, which a convolution, a shift or a window sees.

Ranks exchange the edges of their blocks (a halo exchange), not the blocks. Blocks may be in zigzag order. All edges are
in one all-gather, and their gradients in one reduce-scatter.

    sequence         | block 0 | block 1 | block 2 | block 3 |
    block 2 gets               before ->|=========|<- behind
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.torch.tensor_parallel.rules import Unsplittable
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensors.shards import sizes_of

from .exchange import Share


def is_balanced(shard_group: ShardGroup) -> bool:
    """True if each rank has a block from either end of a sequence."""
    return bool(getattr(shard_group, "balanced", False))


def block_sizes(total: int, shard_group: ShardGroup) -> list[int]:
    """The number of positions in each block of a sequence, in the sequence's order."""
    return sizes_of(total, shard_group.size * (1 + is_balanced(shard_group)))


def own_blocks(shard_group: ShardGroup) -> list[int]:
    """The numbers of this rank's blocks, in order."""
    rank, size = shard_group.rank, shard_group.size
    return [rank, 2 * size - 1 - rank] if is_balanced(shard_group) else [rank]


def blocks_of(shard: Tensor, dim: int, total: int, shard_group: ShardGroup) -> list[Tensor]:
    """This rank's blocks of a sequence with ``total`` positions along ``dim``."""
    sizes = block_sizes(total, shard_group)
    return list(shard.split([sizes[number] for number in own_blocks(shard_group)], dim))


def of_all_blocks(own: list[Tensor], shard_group: ShardGroup) -> Tensor:
    """The tensors that all ranks have for their blocks, one for each, behind each other in the sequence's order.

    Each rank makes something of its own of them, and all ranks make something: gradients are summed.
    """
    found: Tensor = Share.apply(torch.stack(own), 0, shard_group.size * len(own), shard_group)
    return found


def with_neighbours(
    shard: Tensor, dim: int, total: int, before: int, behind: int, shard_group: ShardGroup,
    head: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """This rank's blocks, each with the positions in front of it and behind it; zeros beyond the sequence.

    Args:
        shard: This rank's positions.
        dim: The dim of positions.
        total: The number of positions of the whole sequence.
        before: How many positions to add in front. If it is negative, so many are left out.
        behind: The same behind.
        shard_group: The ranks that share the sequence.
        head: What stands in front of the sequence instead of zeros: ``before`` positions.

    Raises:
        Unsplittable: A block has fewer positions than its neighbour needs.
    """
    sizes, blocks = block_sizes(total, shard_group), blocks_of(shard, dim, total, shard_group)
    front, back = max(before, 0), max(behind, 0)
    if front > min(sizes[:-1]) or back > min(sizes[1:-1], default=back):
        raise Unsplittable(f"sees more positions beside its own than the {min(sizes[:-1])} of a block")
    found = [[block] for block in blocks]
    if front or back:
        edges = [torch.cat([_last(block, dim, front), _first(block, dim, back)], dim) for block in blocks]
        full = of_all_blocks(edges, shard_group)
        for pieces, number in zip(found, own_blocks(shard_group), strict=True):
            # the edges of every rank are in its graph, also where zeros take their place: all ranks sum gradients
            if front:
                pieces.insert(0, _or(full[max(number - 1, 0)].narrow(dim, 0, front), number == 0, head))
            if back:
                following = full[min(number + 1, len(sizes) - 1)].narrow(dim, front, back)
                pieces.append(_or(following, number + 1 == len(sizes), None))
    joined = [pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) for pieces in found]
    first, lost = max(-before, 0), max(-before, 0) + max(-behind, 0)
    return [each.narrow(dim, first, each.shape[dim] - lost) for each in joined]


def _or(edge: Tensor, outside: bool, beyond: Tensor | None) -> Tensor:
    """The edge of a neighbour; what is beyond the sequence, where there is none."""
    mask = torch.full((), outside, dtype=torch.bool, device=edge.device)
    return torch.where(mask, edge.new_zeros(()) if beyond is None else beyond.to(edge.dtype), edge)


def _last(block: Tensor, dim: int, count: int) -> Tensor:
    """The last positions of a block; only that of the sequence's end, whose nobody needs, may have fewer."""
    have = min(count, block.shape[dim])
    return _filled(block.narrow(dim, block.shape[dim] - have, have), dim, count)


def _first(block: Tensor, dim: int, count: int) -> Tensor:
    """The first positions of a block; behind the sequence are zeros."""
    return _filled(block.narrow(dim, 0, min(count, block.shape[dim])), dim, count)


def _filled(tensor: Tensor, dim: int, count: int) -> Tensor:
    missing = count - tensor.shape[dim]
    if not missing:
        return tensor
    shape = [*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
