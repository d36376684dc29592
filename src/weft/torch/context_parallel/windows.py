"""Attention in windows: a rank gets the keys and values that its mask shows, and no others.

A mask is whole, and the same on all ranks. So each reads from it how far any block of positions sees beyond itself; all
ranks come to the same number, and nothing is sent for it. A mask is read once, and again where it has been written.
Where a block sees more positions than it has, keys and values of all are gathered.

    keys         | block 0 | block 1 | block 2 | block 3 |
    queries of block 2     before ->|=========|            a sliding window
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.torch.pytorch.private import base_of, version
from weft.torch.tensor_parallel.shard_group import ShardGroup
from weft.torch.tensors.marks import REACH

from .neighbours import block_sizes, blocks_of, own_blocks, with_neighbours

Reach = tuple[int, int]
"""The number of positions that a block sees in front of itself, and behind."""


def reach_of(mask: Tensor, total: int, shard_group: ShardGroup) -> Reach | None:
    """The reach of blocks of ``total`` positions by a mask; None if that is more than a block.

    Args:
        mask: (..., positions, positions): booleans, or numbers added to scores, with ``-inf`` for what is not seen.
        total: The number of positions.
        shard_group: The ranks that share the sequence.
    """
    if mask.ndim < 2 or mask.shape[-2:] != (total, total) or type(mask) is not Tensor or mask.is_meta:
        return None
    sizes = block_sizes(total, shard_group)
    first, last = _reach(mask, sizes)
    return (first, last) if first + last <= min(sizes) else None


def _reach(mask: Tensor, sizes: list[int]) -> Reach:
    """The same, known from before for a mask of which nothing was written since; layers see one mask in turn."""
    if mask.is_inference():
        return _read(mask, sizes)
    seen = base_of(mask)
    base = mask if seen is None else seen
    known = getattr(base, REACH) or {}
    key = (
        version(mask),
        mask.data_ptr(),
        mask.shape,
        mask.stride(),
        mask.storage_offset(),
        mask.dtype,
        tuple(sizes),
    )
    if key not in known:
        known = {
            key: _read(mask, sizes),
            **{other: seen for other, seen in known.items() if other[0] == key[0]},
        }
        setattr(base, REACH, known)
    found: Reach = known[key]
    return found


@torch.no_grad()
def _read(mask: Tensor, sizes: list[int]) -> Reach:
    for dim in range(mask.ndim - 2):  # one of equal ones
        if mask.stride(dim) == 0 or mask.shape[dim] == 1:
            mask = mask.narrow(dim, 0, 1)
    mask = mask.reshape(-1, *mask.shape[-2:])
    shown = [
        (rows if rows.dtype == torch.bool else rows != float("-inf")).flatten(0, 1).any(0)
        for rows in mask.split(sizes, 1)
    ]
    seen = torch.stack(shown).cpu()
    first = last = start = 0
    for size, row in zip(sizes, seen, strict=True):
        found = row.nonzero()
        if len(found):
            first = max(first, start - int(found[0]))
            last = max(last, int(found[-1]) + 1 - start - size)
        start += size
    return first, last


def windowed(
    func: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, reach: Reach, given: dict[str, Any],
    shard_group: ShardGroup,
) -> Tensor:  # fmt: skip
    """Attention of this rank's positions to those that the mask shows.

    Args:
        func: The function of PyTorch.
        query: This rank's positions, (..., positions, width).
        key: The same.
        value: The same.
        mask: The whole one.
        reach: What :func:`reach_of` gave for the mask.
        given: Other arguments of the function.
        shard_group: The ranks that share the sequence.
    """
    total = mask.shape[-2]
    sizes, (before, behind) = block_sizes(total, shard_group), reach
    queries = blocks_of(query, query.ndim - 2, total, shard_group)
    keys, values = (
        with_neighbours(each, each.ndim - 2, total, before, behind, shard_group) for each in (key, value)
    )
    found = []
    for number, *block in zip(own_blocks(shard_group), queries, keys, values, strict=True):
        start = sum(sizes[:number])
        first, stop = max(start - before, 0), min(start + sizes[number] + behind, total)
        near = [each.narrow(-2, first - (start - before), stop - first) for each in block[1:]]
        rows = mask[..., start : start + sizes[number], first:stop]
        found.append(func(block[0], *near, attn_mask=rows, **given))
    return found[0] if len(found) == 1 else torch.cat(found, -2)
