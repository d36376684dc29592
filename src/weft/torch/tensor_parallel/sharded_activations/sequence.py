"""Between full tensors and parts of a sequence: what ranks send each other, forwards and backwards.

A row-parallel linear gives each rank a partial sum. With ``sequence_parallel`` each rank gets the
sum of its own tokens only, and a column-parallel linear gathers them again (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198). Both together send as much as adding up everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup, enter
from weft.torch.tensors.shards import ShardPositions

from .tensor import ShardedActivation, may_stay_sharded, plain, sharded_activation


def scattered(sums: Tensor, shard_group: ShardGroup, bias: Tensor | None = None) -> Tensor:
    """The sum of the ranks' tensors ``[..., tokens, features]``, and a bias; each rank has some of the tokens of it."""
    along = sums.ndim - 2
    positions = ShardPositions.contiguous([sums.shape[along] // shard_group.size] * shard_group.size)
    shard: Tensor = Scattered.apply(sums, shard_group, along, positions)
    if bias is not None:
        shard.add_(enter(bias.to(shard.dtype), shard_group))
    return sharded_activation(shard, shard_group, along, positions)


def can_scatter(sums: Tensor, shard_group: ShardGroup) -> bool:
    """True if ranks may leave ``[..., tokens, features]`` sharded now, and have as many tokens each."""
    return sums.ndim >= 2 and sums.shape[-2] % shard_group.size == 0 and may_stay_sharded()


def enters(tensor: Any, shard_group: ShardGroup) -> Tensor:
    """A tensor on its way to the parts of a cut linear, with all tokens; its gradient is the sum of the ranks'."""
    if not isinstance(tensor, ShardedActivation):
        return enter(tensor, shard_group)
    if tensor.along != tensor.ndim - 2 or tensor.old() or tensor.shard_group is not shard_group:
        return enter(plain(tensor), shard_group)
    result: Tensor = Gathered.apply(tensor.shard, shard_group, tensor.along, tensor.positions)
    return result


def narrowed(full: Tensor, along: int, positions: ShardPositions, shard_group: ShardGroup) -> Tensor:
    """This rank's part of a tensor that all ranks have; its gradient is that of all parts."""
    if torch.is_grad_enabled() and full.requires_grad:
        result: Tensor = Narrowed.apply(full, shard_group, along, positions)
        return result
    return positions.own(full, along, shard_group.rank)


class Scattered(Quiet):
    """The sum of the ranks' tensors, each rank a part; backwards each gets the whole gradient."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, shard_group: ShardGroup, along: int, positions: ShardPositions
    ) -> Tensor:
        ctx.shard_group, ctx.along, ctx.positions = shard_group, along, positions
        return shard_group.reduce_scatter(sums, along, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.full_tensor(gradient, ctx.along, ctx.positions), None, None, None


class Gathered(Quiet):
    """The ranks' shards as the full tensor, which each uses for something else; gradients are reduce-scattered."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, shard_group: ShardGroup, along: int, positions: ShardPositions
    ) -> Tensor:
        ctx.shard_group, ctx.along, ctx.positions = shard_group, along, positions
        return shard_group.full_tensor(shard, along, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.reduce_scatter(gradient, ctx.along, ctx.positions), None, None, None


class Narrowed(Quiet):
    """A part of a whole; backwards the whole gets the gradients of all parts."""

    @staticmethod
    def forward(
        ctx: Any, full: Tensor, shard_group: ShardGroup, along: int, positions: ShardPositions
    ) -> Tensor:
        ctx.shard_group, ctx.along, ctx.positions = shard_group, along, positions
        return positions.own(full, along, shard_group.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard_group.full_tensor(gradient, ctx.along, ctx.positions), None, None, None
