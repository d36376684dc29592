"""Between whole tensors and parts of a sequence: what ranks send each other, forwards and backwards.

A linear that is cut by its inputs gives each rank a sum to be added up. With ``sequence_parallel`` each rank gets the
sum of its own tokens only, and a linear that is cut by its results gathers them again (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198). Both together send as much as adding up everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup, enter
from weft.torch.tensors.shard_positions import Places

from .tensor import ShardedActivation, may_spread, plain, spread


def scattered(sums: Tensor, shard_group: ShardGroup, bias: Tensor | None = None) -> Tensor:
    """The sum of the ranks' tensors ``[..., tokens, features]``, and a bias; each rank has some of the tokens of it."""
    along = sums.ndim - 2
    places = Places.behind([sums.shape[along] // shard_group.size] * shard_group.size)
    part: Tensor = Scattered.apply(sums, shard_group, along, places)
    if bias is not None:
        part.add_(enter(bias.to(part.dtype), shard_group))
    return spread(part, shard_group, along, places)


def can_scatter(sums: Tensor, shard_group: ShardGroup) -> bool:
    """True if ranks may leave ``[..., tokens, features]`` in parts now, and have as many tokens each."""
    return sums.ndim >= 2 and sums.shape[-2] % shard_group.size == 0 and may_spread()


def enters(tensor: Any, shard_group: ShardGroup) -> Tensor:
    """A tensor on its way to the parts of a cut linear, with all tokens; its gradient is the sum of the ranks'."""
    if not isinstance(tensor, ShardedActivation):
        return enter(tensor, shard_group)
    if tensor.along != tensor.ndim - 2 or tensor.old() or tensor.shard_group is not shard_group:
        return enter(plain(tensor), shard_group)
    result: Tensor = Gathered.apply(tensor.part, shard_group, tensor.along, tensor.places)
    return result


def narrowed(whole: Tensor, along: int, places: Places, shard_group: ShardGroup) -> Tensor:
    """This rank's part of a tensor that all ranks have; its gradient is that of all parts."""
    if torch.is_grad_enabled() and whole.requires_grad:
        result: Tensor = Narrowed.apply(whole, shard_group, along, places)
        return result
    return places.own(whole, along, shard_group.rank)


class Scattered(Quiet):
    """The sum of the ranks' tensors, each rank a part; backwards each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, shard_group: ShardGroup, along: int, places: Places) -> Tensor:
        ctx.shard_group, ctx.along, ctx.places = shard_group, along, places
        return shard_group.add_up_parts(sums, along, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.whole_of(gradient, ctx.along, ctx.places), None, None, None


class Gathered(Quiet):
    """The ranks' parts as the whole, which each uses for something else; backwards their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shard_group: ShardGroup, along: int, places: Places) -> Tensor:
        ctx.shard_group, ctx.along, ctx.places = shard_group, along, places
        return shard_group.whole_of(part, along, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.add_up_parts(gradient, ctx.along, ctx.places), None, None, None


class Narrowed(Quiet):
    """A part of a whole; backwards the whole gets the gradients of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, shard_group: ShardGroup, along: int, places: Places) -> Tensor:
        ctx.shard_group, ctx.along, ctx.places = shard_group, along, places
        return places.own(whole, along, shard_group.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.whole_of(gradient, ctx.along, ctx.places), None, None, None
