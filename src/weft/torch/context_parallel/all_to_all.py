"""Attention over whole sequences of this rank's heads: an all-to-all gives heads for positions, another one back.

DeepSpeed-Ulysses, arXiv 2309.14509. Each tensor of queries, keys, values and results is sent once in a pass, whatever
the number of ranks; an all-gather sends keys and values to every other rank.

        this rank's positions, all heads                      all positions, this rank's heads
    q, k, v ─────────────────────────────── all-to-all ──────────── attention of the whole sequence ──┐
    result  ─────────────────────────────── all-to-all ──────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup

from .weights import ContextGroup

FACTOR = 2
"""All-to-all may send more, since attention of whole sequences is one call of the kernel, without a mask: with 8 heads
and 2 of keys two ranks send 1.7 times as much, and a step takes 0.85 of the time (`benchmarks/context_parallel`)."""


def chosen(query: DTensor, key: DTensor, value: DTensor, shard_group: ContextGroup) -> bool:
    """True if the ranks compute attention of these, each for its own heads. They are sharded along positions."""
    local = query.to_local(), key.to_local(), value.to_local()
    if shard_group.attention == "all_gather" or shard_group.collectives is None:
        return False
    total, size = query.shape[-2], shard_group.size
    if not (
        query.ndim == key.ndim == value.ndim >= 4
        and all(each.shape[-3] % size == 0 for each in local)
        and total == key.shape[-2] == value.shape[-2]
        and len(set(shard_group.positions(total).sizes)) == 1
    ):
        return False
    return shard_group.attention == "all_to_all" or _pays(*local, size)


def _pays(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> bool:
    """True if all-to-all sends at most `FACTOR` times what an all-gather of keys and values sends in a step.

    A rank sends ``(n - 1) / n`` of each of four tensors, in a forward and a backward pass; or ``n - 1`` times its keys
    and values, in a forward pass, again in a backward pass, and their gradients. Shapes alone decide: what an
    activation checkpoint computes again is computed in the same way, with the same random numbers.
    """
    kept = key.nbytes + value.nbytes
    moved = query.nbytes * (1 + value.shape[-1] / query.shape[-1]) + kept
    return 2 * moved <= FACTOR * 3 * ranks * kept


def of_own_heads(mask: Tensor, heads: int, shard_group: ShardGroup) -> Tensor:
    """A mask, or what is added to scores, for this rank's heads of so many."""
    if mask.ndim < 3 or mask.shape[-3] != heads or heads == 1:
        return mask
    own = heads // shard_group.size
    return mask.narrow(-3, shard_group.rank * own, own)


def heads_for_positions(tensors: Sequence[Tensor], shard_group: ShardGroup) -> tuple[Tensor, ...]:
    """All positions of this rank's heads, of tensors with all heads at its positions.

    Each is (..., heads, positions, width).
    """
    found: tuple[Tensor, ...] = _HeadsForPositions.apply(shard_group, *tensors)
    return found


def positions_for_heads(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    """All heads at this rank's positions, of a tensor with all positions of its heads."""
    (found,) = _PositionsForHeads.apply(shard_group, tensor)
    return found


def _all_positions(tensors: Sequence[Tensor], shard_group: ShardGroup) -> tuple[Tensor, ...]:
    blocks = [each.unflatten(-3, (shard_group.size, -1)).movedim(-4, 0) for each in tensors]
    positions = shard_group.positions(tensors[0].shape[-2] * shard_group.size)
    return tuple(positions.joined(each.unbind(0), -2) for each in _exchanged(blocks, shard_group))


def _all_heads(tensors: Sequence[Tensor], shard_group: ShardGroup) -> tuple[Tensor, ...]:
    positions = shard_group.positions(tensors[0].shape[-2])
    blocks = [
        torch.stack([positions.own(each, -2, rank) for rank in range(shard_group.size)]) for each in tensors
    ]
    return tuple(each.movedim(0, -4).flatten(-4, -3) for each in _exchanged(blocks, shard_group))


def _exchanged(blocks: Sequence[Tensor], shard_group: ShardGroup) -> list[Tensor]:
    """Blocks for each rank become blocks of each rank, in one message. Dim 0 are the ranks."""
    flat = [each.reshape(shard_group.size, -1) for each in blocks]
    came = shard_group.all_to_all(flat[0] if len(flat) == 1 else torch.cat(flat, 1))
    return [
        piece.reshape(each.shape)
        for piece, each in zip(came.split([each.shape[1] for each in flat], 1), blocks, strict=True)
    ]


class _HeadsForPositions(Quiet):
    @staticmethod
    def forward(ctx: Any, shard_group: ShardGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard_group = shard_group
        return _all_positions(tensors, shard_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_all_heads(gradients, ctx.shard_group)


class _PositionsForHeads(Quiet):
    @staticmethod
    def forward(ctx: Any, shard_group: ShardGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard_group = shard_group
        return _all_heads(tensors, shard_group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_all_positions(gradients, ctx.shard_group)
