"""Recurrences along positions: each rank has its own, and begins where the rank before has ended.

`cumsum` needs the sums of the blocks in front alone: all ranks compute at once. An `nn.LSTM` needs its state behind
them, which goes from rank to rank. One rank computes at a time, so this divides memory, not time.

    rank 0   | positions 0..3 | -> state
    rank 1                         | positions 4..7 | -> state
    backward                                            gradients of the states go the other way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.rules import Rule, Unsplittable, shard_of, stream_of_part
from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup

from .exchange import sharded
from .neighbours import blocks_of, is_balanced, of_all_blocks, own_blocks
from .weights import used


def cumulative_sum(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums of all positions up to each."""
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    x, dim = given.pop("input"), given.pop("dim")
    if shard_of(x) != dim % x.ndim:
        return NotImplemented
    dim, total = dim % x.ndim, x.shape[dim]
    sums = [func(block, dim, **given) for block in blocks_of(x.to_local(), dim, total, shard_group)]
    ends = of_all_blocks([each.narrow(dim, each.shape[dim] - 1, 1) for each in sums], shard_group)
    numbers = torch.arange(len(ends), device=ends.device).view(-1, *[1] * x.ndim)
    found = [
        each + torch.where(numbers < number, ends, 0).sum(0, dtype=ends.dtype)
        for each, number in zip(sums, own_blocks(shard_group), strict=True)
    ]
    return sharded(torch.cat(found, dim), dim, total, shard_group)


def recurrent(shard_group: ShardGroup, func: Any, args: Any, kwargs: Any) -> Any:
    """The layers of `nn.LSTM`, `nn.GRU` and `nn.RNN`."""
    if kwargs or len(args) != 9 or not isinstance(args[2], (list, tuple)):
        raise Unsplittable("gets packed sequences")
    x, states, weights, has_biases, layers, rate, training, both_ways, batch_first = args
    states = [states] if isinstance(states, Tensor) else [*states]
    dim = x.ndim - 2 if batch_first else 0
    if shard_of(x) != dim or any(isinstance(each, DTensor) for each in (*states, *weights)):
        raise Unsplittable("goes along another dim than positions")
    if both_ways:
        raise Unsplittable("goes along positions both ways")
    if is_balanced(shard_group):
        raise Unsplittable("goes from one position to the next")

    whole = [used(each, shard_group) for each in (*states, *weights)]
    states, weights = whole[: len(states)], whole[len(states) :]
    with stream_of_part(shard_group, rate > 0 and training):
        own, *begins = _Begin.apply(shard_group, len(states), x.to_local(), *states, *weights)
        begin = begins[0] if isinstance(args[1], Tensor) else begins
        local, *ends = func(own, begin, weights, has_biases, layers, rate, training, False, batch_first)
    kind = ends[0].dtype  # another one than the states' under autocast: all ranks send the same
    local, *last = _End.apply(shard_group, local, *(end.to(begins[0].dtype) for end in ends))
    return sharded(local, dim, x.shape[dim], shard_group), *(each.to(kind) for each in last)


class _Begin(Quiet):
    """This rank's positions, and the states in front of them, which it gets from the rank before.

    Weights come as well: where they need gradients, the rank before needs those of its states.
    """

    @staticmethod
    def forward(
        ctx: Any, shard_group: ShardGroup, count: int, own: Tensor, *whole: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shard_group, ctx.needs = shard_group, len(whole) - count
        states, flat = whole[:count], _joined(whole[:count])
        for turn in range(shard_group.rank):
            flat = _from(turn, torch.zeros_like(flat), shard_group)
        return own.view_as(own), *_apart(flat, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *of_states: Tensor) -> tuple[Tensor | None, ...]:
        shard_group, flat = ctx.shard_group, _joined(of_states)
        for turn in range(shard_group.rank, 0, -1):
            _from(turn, flat if turn == shard_group.rank else torch.zeros_like(flat), shard_group)
        if shard_group.rank:  # what the sequence begins with belongs to its first rank
            of_states = tuple(map(torch.zeros_like, of_states))
        return None, None, gradient, *of_states, *[None] * ctx.needs


class _End(Quiet):
    """This rank's result, and the states at the end of the sequence, which all ranks get from the last one."""

    @staticmethod
    def forward(ctx: Any, shard_group: ShardGroup, own: Tensor, *ends: Tensor) -> tuple[Tensor, ...]:
        ctx.shard_group, flat = shard_group, _joined(ends)
        for turn in range(shard_group.rank, shard_group.size):
            flat = _from(turn, flat, shard_group)
        return own.view_as(own), *_apart(flat, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *of_states: Tensor) -> tuple[Tensor | None, ...]:
        shard_group, flat = ctx.shard_group, _joined(of_states)
        for turn in range(shard_group.size - 1, shard_group.rank, -1):
            flat = _from(turn, torch.zeros_like(flat), shard_group)
        return None, gradient, *_apart(flat, of_states)


def _from(turn: int, flat: Tensor, shard_group: ShardGroup) -> Tensor:
    """The tensor of the rank whose turn it is. All ranks call this, in the same turns."""
    return shard_group.gather(flat, 0, [len(flat)] * shard_group.size)[turn]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in tensors])


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that make a flat one, in the shapes of others. Copies: results must not share memory."""
    pieces = flat.split([each.numel() for each in like])
    return [piece.view(each.shape).clone() for piece, each in zip(pieces, like, strict=True)]


RECURRENT: dict[Any, Rule] = dict.fromkeys(
    named((torch,), ("lstm", "gru", "rnn_tanh", "rnn_relu")), recurrent
)
CUMULATIVE: dict[Any, Rule] = dict.fromkeys(named((torch, torch.Tensor), ("cumsum",)), cumulative_sum)
