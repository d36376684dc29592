"""A sharded activation: each rank has a shard of it, and it looks like the whole.

It is between cut modules: the scores of a vocabulary, and, along tokens or positions, what runs between two regions.
Functions that can work on the parts do (``rules``); everything else gets the whole, gathered from the ranks when it is
first asked for. So the result is right, whatever is done with the tensor; what no rule covers costs a message.

The whole may be written through a view of it. Then the part is old, here and in all sharded views, and the whole is
used from then on: PyTorch's count of writes shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.errors import UsageError
from weft.torch.pytorch.private import (
    in_backward,
    is_mutable,
    no_function_of_subclass,
    version,
    without_memory,
)
from weft.torch.pytorch.torch_functions import AUTOGRAD, METADATA, STANDS_FOR, targets
from weft.torch.tensor_parallel.shard_group import ALL_GATHERS, Quiet
from weft.torch.tensors import shards
from weft.torch.tensors.cut_weights import inside_unit
from weft.torch.tensors.pytree import leaves_in, map_arguments
from weft.torch.tensors.shards import ShardPositions

_NO_MEMORY = UsageError(
    "a tensor that is split over axis tp was written, and a function below PyTorch's own reads it: make a copy first, "
    "x.clone(), and write into that"
)
_WATCHED = frozenset((Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_))
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""Rules of functions that are given sharded activations; ``rules`` fills it."""


class Ranks(Protocol):
    """The ranks that hold the parts: a group, or who stands for one."""

    rank: int
    size: int

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The tensors of all ranks behind each other."""
        ...

    def agree(self, what: str) -> None:
        """All ranks are about to do ``what``; an error where one is not."""
        ...

    def noted(self, names: frozenset[str], what: str, how: str) -> None:
        """A function has taken a sharded activation that comes from these modules; ``how``: see ``watch``."""
        ...


class ShardedActivation(Tensor):
    """See the module.

    Attributes:
        part: This rank's part.
        group: The ranks.
        along: The dimension along which it is sharded.
        positions: What of this dimension each rank has.
        names: While it is found out what may stay sharded: the modules that the tensor comes from.
    """

    _weft_spread = True
    shard: Tensor
    shard_group: Any
    along: int
    positions: ShardPositions
    names: frozenset[str]
    _node: Any
    _made: tuple[ShardedActivation, Callable[[Tensor], Tensor]] | None
    _held: Tensor | None
    _count: int

    @property
    def back(self) -> int:
        """The place of ``along``, counted from the last dimension, which is 1."""
        return self.ndim - self.along

    def old(self) -> bool:
        """True if somebody has written into the whole, so that the part does not show it."""
        written = self._held is not None and version(self._held) != self._count
        return written or (self._made is not None and self._made[0].old())

    def moved(self) -> bool:
        """True if it came out of an autograd function of the script's, whose gradient the part does not know."""
        with no_function_of_subclass():
            return self.grad_fn is not self._node

    def full_tensor(self) -> Tensor:
        """The whole, as a plain tensor; all ranks call this together if one does."""
        if self.moved() and torch.is_grad_enabled():
            moved: Tensor = Unmoved.apply(self)
            return moved
        if self._made is not None:
            of, view = self._made
            return view(of.full_tensor())
        if self.old():
            assert self._held is not None
            return self._held
        needs = torch.is_grad_enabled() and self.shard.requires_grad
        if self._held is None or (needs and not self._held.requires_grad):
            if inside_unit():
                self.shard_group.agree(ALL_GATHERS)
            self._held = AllGathered.apply(self.shard, self.shard_group, self.along, self.positions)
            self._count = version(self._held)
        return self._held

    def like(
        self, shard: Tensor, along: int, view: Callable[[Tensor], Tensor] | None = None,
        positions: ShardPositions | None = None,
    ) -> ShardedActivation:  # fmt: skip
        """Another one, at the same positions if none are given. ``view``: makes it from the full tensor, if they
        share memory."""
        if shard is self.shard:
            return self
        made = None if view is None else (self, view)
        return sharded_activation(
            shard, self.shard_group, along, positions or self.positions, self.names, made
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = getattr(func, STANDS_FOR, getattr(func, "__wrapped__", func))  # what weft has put in its place
        if own in METADATA or own in AUTOGRAD or own is Tensor.untyped_storage:
            _refuse_watching(func, args, kwargs)
            with no_function_of_subclass():
                return func(*args, **kwargs)
        given = sharded_in((args, kwargs))
        written = [each for each in targets(func, args, kwargs) if isinstance(each, ShardedActivation)]
        if written:
            _note(written, func, "writes")
            raise UsageError(
                f"{_name(func)} writes into a tensor that is split over axis tp; write into a copy: x.clone()"
            )
        if any(each.old() for each in given):
            _note(given, func, "writes")
        elif any(each.moved() for each in given):
            pass
        elif (rule := RULES.get(func, RULES.get(own))) is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        _note(given, func, "whole")
        args, kwargs = with_full_tensors((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Operations that come here by another way than PyTorch's functions get the whole, without its graph."""
        given = sharded_in((args, kwargs or {}))
        if any(each.old() for each in given):
            raise _NO_MEMORY
        _note(given, func, "writes" if is_mutable(func) else "whole")
        with torch.no_grad():
            args, kwargs = with_full_tensors((args, kwargs or {}), Tensor.detach)
        return func(*args, **kwargs)


def sharded_activation(
    shard: Tensor, shard_group: Any, along: int, positions: ShardPositions, names: frozenset[str] = frozenset(),
    made: tuple[ShardedActivation, Callable[[Tensor], Tensor]] | None = None,
) -> ShardedActivation:  # fmt: skip
    """The ranks' shards as one tensor."""
    along %= shard.ndim
    result: ShardedActivation = Shown.apply(shard, shard_group, along, positions)
    result.shard, result.shard_group, result.along, result.positions, result.names = (
        shard,
        shard_group,
        along,
        positions,
        names,
    )
    result._made, result._held, result._count = made, None, 0
    with no_function_of_subclass():
        result._node = result.grad_fn
    return result


def may_stay_sharded() -> bool:
    """True if a module that runs now may leave its result sharded: in a step, where all ranks run the same."""
    return inside_unit() or in_backward()


def plain(tensor: Tensor) -> Tensor:
    """The whole of a sharded activation; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, ShardedActivation) else tensor


shards.register(ShardedActivation, plain, on_use=True)


def sharded_in(tree: Any) -> list[ShardedActivation]:
    """The sharded activations in lists, tuples and dicts."""
    return [each for each in leaves_in(tree, data=False) if isinstance(each, ShardedActivation)]


def with_full_tensors(tree: Any, then: Callable[[Tensor], Tensor] = lambda full: full) -> Any:
    """A tree of arguments with the whole of sharded activations."""
    return map_arguments(tree, lambda t: then(t.full_tensor()) if isinstance(t, ShardedActivation) else t)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


def _note(given: list[ShardedActivation], func: Any, how: str) -> None:
    for each in given:
        each.shard_group.noted(each.names, _name(func), how)


def _refuse_watching(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse what asks for a gradient of the tensor: it is that of the parts' ways, too.

    Raises:
        UsageError: Always, then.
    """
    asked = func in _WATCHED and not (func is Tensor.requires_grad_ and args[0].requires_grad)
    if func is torch.autograd.grad:
        asked = bool(sharded_in(args[1] if len(args) > 1 else kwargs.get("inputs")))
    if asked:
        given = sharded_in((args, kwargs))
        _note(given, func, "writes")
        raise UsageError(
            f"{_name(func)} on a tensor that is split over axis tp: {given[0].shard_group.remedy}"
        )


class Shown(Quiet):
    """A part, shown as the whole; the part gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shard_group: Any, along: int, positions: ShardPositions) -> Tensor:
        ctx.along, ctx.positions, ctx.rank = along, positions, shard_group.rank
        total, own = positions.total, max(1, shard.shape[along])
        shape = [total if dim == along else size for dim, size in enumerate(shard.shape)]
        outer = shard.stride(along)
        strides = [stride if stride <= outer else stride * total // own for stride in shard.stride()]
        return without_memory(ShardedActivation, shape, strides, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.positions.own(gradient, ctx.along, ctx.rank).contiguous(), None, None, None


class Unmoved(Quiet):
    """The whole of a sharded activation, with the gradient of the tensor itself."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedActivation) -> Tensor:
        return tensor.full_tensor().detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class AllGathered(Quiet):
    """The whole of the ranks' parts; each rank's part gets its part of the gradient, which all have whole."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shard_group: Any, along: int, positions: ShardPositions) -> Tensor:
        ctx.along, ctx.positions, ctx.rank = along, positions, shard_group.rank
        return shard_group.full_tensor(shard, along, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.positions.own(gradient, ctx.along, ctx.rank).contiguous(), None, None, None
