"""Recurrences along positions: each rank has its own, and begins where the rank before has ended.

`cumsum` needs the sums of the blocks in front alone: all ranks compute at once. An `nn.LSTM` needs its state behind
them, which goes from rank to rank. One rank computes at a time, so this divides memory, not time.

    rank 0   | positions 0..3 | -> state
    rank 1                         | positions 4..7 | -> state
    backward                                            gradients of the states go the other way
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.torch.pytorch.torch_functions import named
from weft.torch.tensor_parallel.rules import Rule, Unsplittable, shard_of, stream_of_part
from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup

from .exchange import sharded
from .neighbours import blocks_of, is_balanced, of_all_blocks, own_blocks
from .weights import used

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
"""From a rank's positions, the states in front of them and weights to the result and the states behind."""


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

    def run(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own, found = tensors[0], tensors[1 : 1 + len(states)]
        state = found[0] if isinstance(args[1], Tensor) else found
        how = has_biases, layers, rate, training, False, batch_first
        result: tuple[Tensor, ...] = func(own, state, tensors[1 + len(states) :], *how)
        return result

    whole = [used(each, shard_group) for each in (*states, *weights)]
    with stream_of_part(shard_group, rate > 0 and training):
        local, *last = _Chain.apply(run, shard_group, len(states), x.to_local(), *whole)
    return sharded(local, dim, x.shape[dim], shard_group), *last


class _Chain(Quiet):
    """A recurrence of which one rank computes after the other. Gives its positions, and the states at the end, which
    all ranks get alike."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, shard_group: ShardGroup, count: int, own: Tensor, *whole: Tensor
    ) -> tuple[Tensor, ...]:
        states, weights = whole[:count], whole[count:]
        state = _joined(states)
        for turn in range(shard_group.size):
            if turn == shard_group.rank:
                begins = states if turn == 0 else _apart(state, states)
                leaves = [each.detach() for each in (own, *begins, *weights)]
                with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                    for each, wants in zip(leaves, ctx.needs_input_grad[3:], strict=True):
                        each.requires_grad_(wants)
                    for each in leaves[1 : 1 + count]:
                        each.requires_grad_(any(ctx.needs_input_grad))
                    results = run(leaves)
            ends = _joined(results[1:]) if turn == shard_group.rank else torch.zeros_like(state)
            state = shard_group.gather(ends.detach(), 0, [len(state)] * shard_group.size)[turn]
        ctx.shard_group, ctx.count, ctx.leaves, ctx.results = shard_group, count, leaves, results
        return results[0].detach(), *_apart(state, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *of_states: Tensor) -> tuple[Tensor | None, ...]:
        shard_group, leaves, results = ctx.shard_group, ctx.leaves, ctx.results
        if results is None:
            raise UsageError(
                "a recurrence along sequences that are split over axis tp has one backward pass: call the model again"
            )
        ctx.leaves = ctx.results = None
        flat = _joined(of_states)
        for turn in reversed(range(shard_group.size)):
            if turn == shard_group.rank:
                wanted = [each for each in leaves if each.requires_grad]
                of_results = (gradient, *_apart(flat, of_states))
                made = torch.autograd.grad(results, wanted, of_results, allow_unused=True)
                found = dict(zip(map(id, wanted), made, strict=True))
                gradients = [found.get(id(each)) for each in leaves]
                begins = [
                    torch.zeros_like(each) if each_gradient is None else each_gradient
                    for each, each_gradient in zip(leaves[1:], gradients[1 : 1 + ctx.count], strict=False)
                ]
            sent = _joined(begins) if turn == shard_group.rank else torch.zeros_like(flat)
            flat = shard_group.gather(sent, 0, [len(flat)] * shard_group.size)[turn]
        for number in range(1, 1 + ctx.count):  # those of the sequence's begin belong to its first rank
            if shard_group.rank:
                gradients[number] = torch.zeros_like(leaves[number])
        return (
            None,
            None,
            None,
            *(
                each if wants else None
                for each, wants in zip(gradients, ctx.needs_input_grad[3:], strict=True)
            ),
        )


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
