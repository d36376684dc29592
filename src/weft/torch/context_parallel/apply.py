"""A model whose layers compute on parts of sequences, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.torch.pytorch.private import version
from weft.torch.pytorch.private_dtensor import redistributes, take_plain_as_replicated
from weft.torch.tensor_parallel.functions import answer
from weft.torch.tensor_parallel.pieces import local_of
from weft.torch.tensor_parallel.rules import shard_of
from weft.torch.tensor_parallel.shard_group import ShardGroup, shard_group_of
from weft.torch.tensor_parallel.sharded_activations import (
    ShardedActivation,
    may_stay_sharded,
    plain,
    sharded_activation,
)
from weft.torch.tensor_parallel.splits import is_transposed
from weft.torch.tensors.cut_weights import inside_unit
from weft.torch.tensors.pytree import map_arguments, map_tensors

from .exchange import can_cut, cut, like, sharded
from .mesh_2d import put_on_mesh_2d
from .multihead import attend
from .regions import Sequences
from .rules import Positions, gathered
from .scans import know_scans
from .weights import ContextGroup, used
from .zigzag import register_zigzag


def sequence_in(args: Any, kwargs: Any) -> Tensor | None:
    """The sequences in a module's arguments: the first one with samples, positions and features. None without one."""
    return next(
        (each for each in _tensors(args, kwargs) if each.ndim >= 3 and each.is_floating_point()), None
    )


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    waiting = [*args, *kwargs.values()]
    while waiting:
        thing = waiting.pop(0)
        if isinstance(thing, Tensor):
            yield thing
        elif type(thing) in (tuple, list):
            waiting[:0] = thing


def with_shard(args: Any, kwargs: Any, given: Tensor, shard: Tensor) -> Any:
    """The arguments with the part in the place of what a module gets as sequences; all others are whole."""
    return map_arguments((args, kwargs), lambda each: shard if each is given else plain(each))


class Region:
    """Stands for a module's ``forward``: what goes in is cut, what comes out is whole, or looks so.

    ``keeps``: whether what comes out stays sharded until somebody needs the whole; the next region takes the parts.
    ``active``: whether the ranks run the same step now, so that they may meet; elsewhere the module computes whole.
    ``unit``: whether the module is called between units, so that what it leaves in objects (keys and values in a cache)
    is all-gathered where somebody uses it; else this is done at once.
    """

    def __init__(
        self, module: nn.Module, dim: int, keeps: bool, shard_group: ContextGroup, active: Callable[[], bool],
        unit: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.dim, self.keeps, self.shard_group, self.active = (
            module,
            dim,
            keeps,
            shard_group,
            active,
        )
        self.unit = unit
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own or MethodType(type(self.module).forward, self.module)
        given = sequence_in(args, kwargs) if self.active() else None
        if (
            given is None
            or given.ndim <= self.dim
            or not can_cut(given.shape[self.dim], self.shard_group.size)
        ):
            return forward(*args, **kwargs)
        shard_group = self.shard_group.for_length(given.shape[self.dim])
        shard = cut(given, self.dim, shard_group) if (own := self._shard(given, shard_group)) is None else own
        before = written(shard)
        args, kwargs = with_shard(args, kwargs, given, shard)
        result = forward(*args, **kwargs)
        if before != written(shard):
            raise UsageError(
                f"{type(self.module).__name__} has written into a part of what it got, which its caller does not see: "
                "let it write into a copy, x.clone()"
            )
        if not (self.unit and inside_unit()):
            make_full(args, kwargs, shard_group)
        return map_tensors(result, lambda each: self._left(each, shard_group))

    def _shard(self, given: Tensor, shard_group: ShardGroup) -> DTensor | None:
        """The shard that another region has left, if this tensor is one and still fits."""
        if (
            not isinstance(given, ShardedActivation)
            or given.shard_group is not shard_group
            or given.old()
            or given.moved()
        ):
            return None
        total = given.shape[self.dim]
        if given.along != self.dim or given.positions != shard_group.positions(total):
            return None
        return sharded(given.shard, self.dim, total, shard_group)

    def _left(self, result: Tensor, shard_group: ShardGroup) -> Tensor:
        keeps = self.keeps and may_stay_sharded() and shard_of(result) == self.dim
        if not keeps or not isinstance(result, DTensor) or len(result.placements) > 1:
            return gathered(result, shard_group)
        return sharded_activation(
            local_of(result), shard_group, self.dim, shard_group.positions(result.shape[self.dim])
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        copied = object.__new__(Region)
        memo[id(self)] = copied
        copied.module, copied.own = memo[id(self.module)], copy.deepcopy(self.own, memo)
        copied.dim, copied.keeps, copied.shard_group, copied.active = (
            self.dim,
            self.keeps,
            self.shard_group,
            self.active,
        )
        copied.unit = self.unit
        return copied


def written(shard: DTensor) -> tuple[int, int]:
    """Numbers that change when somebody writes into the part."""
    return version(shard), version(shard.to_local())


def make_full(args: Any, kwargs: Any, shard_group: ShardGroup) -> None:
    """Gather what objects among a module's arguments hold as shards after its call, keys and values say."""
    for thing in (*args, *kwargs.values()):
        if not isinstance(thing, (Tensor, int, float, str, type(None))) and type(thing) not in (tuple, list):
            map_tensors(thing, lambda tensor: gathered(tensor, shard_group), attributes=True)


class OnPositions:
    """Stands for the ``forward`` of a module that would see samples and positions as one dimension."""

    def __init__(self, module: nn.Module, shard_group: ShardGroup) -> None:
        self.module, self.shard_group = module, shard_group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if not any(isinstance(each, DTensor) for each in (*args, *kwargs.values())):
            return type(module).forward(module, *args, **kwargs)
        if isinstance(module, nn.MultiheadAttention):
            return attend(module, *args, **kwargs)
        (given,) = (*args, *kwargs.values())
        shard_group = shard_group_of(given) or self.shard_group
        weight, bias = (used(each, shard_group) for each in (module.weight, module.bias))
        return like(nn.functional.linear(local_of(given), weight.t(), bias), given, shard_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnPositions:
        copied = memo[id(self)] = OnPositions(memo[id(self.module)], self.shard_group)
        return copied


def placeholder(root: nn.Module, shard_group: ShardGroup) -> list[nn.Module]:
    """Let modules in ``root`` that would see samples and positions as one dimension take parts; which ones they are."""
    found = []
    for module in root.modules():
        known = is_transposed(module) or type(module) is nn.MultiheadAttention
        if known and "forward" not in module.__dict__:
            module.__dict__["forward"] = OnPositions(module, shard_group)
            found.append(module)
    return found


def cut_sequences(
    model: nn.Module, sequences: Sequences, group: Any, rank: int, device: torch.device,
    active: Callable[[], bool], ranks: Tensor | None = None, units: Collection[str] = (),
    attention: str = "auto",
) -> ContextGroup | None:  # fmt: skip
    """Let the modules in ``sequences`` compute on parts of sequences, in place.

    Args:
        model: The model, whole, or what this rank has of it.
        sequences: What :func:`find` found on one of the ranks.
        group: The group of ``torch.distributed`` with the ranks that share sequences.
        rank: This rank's number in the group.
        device: Where the model runs.
        active: Whether all ranks of the group run the same step now.
        ranks: Where other ranks have the other parts of weights, all of them, those that split weights in a row. The
            weights are cut already.
        units: The names of the modules that are called between units.
        attention: The setting ``context_parallel_attention``.

    Returns:
        The ranks that share sequences; None where nothing is cut.

    Raises:
        UsageError: The model has no such module. Nothing was changed.
    """
    modules = dict(model.named_modules())
    missing = sorted(sequences.regions.keys() - modules.keys())
    if missing:
        raise UsageError(f"these parts of sequences do not belong to this model: it has no {missing[0]}")
    regions = {
        name: dim
        for name, dim in sequences.regions.items()
        if not isinstance(modules[name].__dict__.get("forward"), Region)
    }
    if not regions:
        return None
    take_plain_as_replicated()
    know_scans([modules[name] for name in regions])
    shard_group = ContextGroup.of(group, rank, sequences.size, device)
    assert isinstance(shard_group, ContextGroup)
    shard_group.attention = attention
    if sequences.balanced and redistributes:
        shard_group.use_zigzag()
    for order in shard_group.orders():
        answer(Positions(order))
        if order.balanced:
            register_zigzag(order)
    if ranks is not None:
        shard_group.further = put_on_mesh_2d([modules[name] for name in regions], shard_group.orders(), ranks)
    for name, dim in regions.items():
        placeholder(modules[name], shard_group)
        modules[name].__dict__["forward"] = Region(
            modules[name], dim, name in sequences.kept, shard_group, active, name in units
        )
    return shard_group
