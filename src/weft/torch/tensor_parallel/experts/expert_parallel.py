"""A mixture whose experts are modules: each rank has some of them, and runs these only.

All ranks run the mixture's own code, on the same inputs, with the same router. An expert of another rank gives zeros.
So each rank has its experts' share of the result, and the ranks all-reduce once, where the mixture ends. Gradients of
what goes in, and of the router's weights, are all-reduced once as well.

    inputs, router's weights -- EnterAll --> own code: experts --> (zeros from others) -- leave --> result
                                    |        modules beside --> one part of it in each rank --^
                                    '-----> what all compute alike (scores of a router) -- Alike --> result

A residual path, or another thing that is added to the experts' sum, counts once: the module's own code runs a second
time, without experts, and what it gives is taken from each rank's share and added to the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.errors import UsageError
from weft.torch.pytorch.private import in_backward
from weft.torch.session.random_streams import TORCH
from weft.torch.tensor_parallel.cuts import Cut, mark_copies
from weft.torch.tensor_parallel.rules import as_full_tensor, stream_of_part, streams_of
from weft.torch.tensor_parallel.shard_group import Quiet, ShardGroup, leave
from weft.torch.tensor_parallel.sharded_activations import plain
from weft.torch.tensor_parallel.splits import Held, Linear
from weft.torch.tensors.cut_weights import Guarded
from weft.torch.tensors.pytree import leaves_in, map_tensors, tensors_in

NO_TENSOR, ALIKE, SUM, ABOVE = -1, 0, 1, 2
"""What ranks do with a result: nothing, it is none of floating-point numbers; it is the same on all; they add it up; or
what is above that without any experts."""


class Turn:
    """The present run of a mixture's members.

    Attributes:
        twice: Whether each call is followed by another one without experts.
        runs: Whether the mixture's own code runs.
        without: Whether it does so without experts: all give zeros.
        beside: What modules beside the experts are to give then, and the random numbers after them, call by call.
    """

    def __init__(self, twice: bool) -> None:
        self.twice, self.runs, self.without = twice, False, False
        self.beside: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self, without: bool = False) -> Iterator[None]:
        """Inside, the mixture's own code runs."""
        self.runs, self.without = True, without
        try:
            yield
        finally:
            self.runs = self.without = False


class Mixture:
    """Stands for the ``forward`` of a module around experts: full tensors go in and come out."""

    def __init__(self, module: nn.Module, linear: Linear, shard_group: ShardGroup) -> None:
        self.module, self.linear, self.shard_group = module, linear, shard_group
        self.turn = Turn(ABOVE in linear.blocks)
        self.cuts = cuts_of_mixture(module, linear)

    @cached_property
    def shared(self) -> list[tuple[nn.Module, str]]:
        """The parameters of which each rank makes something of its own, the router's say: their modules and names."""
        apart = {each for held in self.linear.held for each in self.module.get_submodule(held.name).modules()}
        owners = [each for each in self.module.modules() if each not in apart]
        return [(owner, name) for owner in owners for name in owner._parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors((args, kwargs), lambda each: as_full_tensor(plain(each)))
        given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        tables: list[tuple[dict[str, Any], str]] = [(owner._parameters, name) for owner, name in self.shared]
        weights = [table[name] for table, name in tables]
        entered = entered_all([*given, *weights], self.shard_group)
        args, kwargs = map_tensors((args, kwargs), lambda each: entered.get(id(each), each))
        try:
            for (table, name), weight in zip(tables, weights, strict=True):
                dict.__setitem__(table, name, entered.get(id(weight), weight))
            if self.turn.twice:
                result, rest = self.with_and_without(*args, **kwargs)
            else:
                with self.turn.running():
                    result, rest = type(self.module).forward(self.module, *args, **kwargs), None
        finally:
            for (table, name), weight in zip(tables, weights, strict=True):
                dict.__setitem__(table, name, weight)
        return self._all_reduced(result, rest, next(iter(entered.values()), None))

    def with_and_without(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The module's result with its experts, and without; both draw the same random numbers."""
        streams = streams_of(self.shard_group)
        before = streams.capture(TORCH)
        try:
            with self.turn.running():
                result = type(self.module).forward(self.module, *args, **kwargs)
            after = streams.capture(TORCH)
            streams.restore(before)
            with self.turn.running(without=True):
                rest = type(self.module).forward(self.module, *args, **kwargs)
            streams.restore(after)
        finally:
            self.turn.beside.clear()
        return result, rest

    def _all_reduced(self, result: Any, rest: Any, anchor: Tensor | None) -> Any:
        """The result of all ranks together.

        ``rest``: what the module gives without experts. ``anchor``: leads to what has entered, also where no own
        expert ran.
        """
        found = leaves_in(result)
        made = [isinstance(each, Tensor) and each.is_floating_point() for each in found]
        known = self.linear.blocks
        if len(found) != len(known) or any(
            is_made and flag == NO_TENSOR for is_made, flag in zip(made, known, strict=True)
        ):
            raise UsageError(
                f"{type(self.module).__name__}, whose experts ranks share, does not give what it gave in the first "
                f"microbatch: {sum(made)} tensors of {len(found)} results, and there were "
                f"{len(known) - known.count(NO_TENSOR)} of {len(known)}. Let it return as many, with None for what is "
                'missing, or write "experts": "expert_tensor_parallel"'
            )
        flags = iter([flag for is_made, flag in zip(made, known, strict=True) if is_made])
        others = iter([each for each in tensors_in(rest) if each.is_floating_point()])

        def one(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            flag, other = next(flags), next(others, None)
            if flag == ALIKE:
                return alike(tensor, self.shard_group.size)
            above = tensor - other if flag == ABOVE and other is not None else tensor
            if anchor is not None:
                above = Anchored.apply(above, anchor)
            sums = leave(above.clone(memory_format=torch.contiguous_format), self.shard_group)
            return sums + alike(other, self.shard_group.size) if flag == ABOVE and other is not None else sums

        return map_tensors(result, one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mixture:
        copied = memo[id(self)] = object.__new__(Mixture)
        copied.module, copied.linear, copied.shard_group = (
            memo[id(self.module)],
            self.linear,
            self.shard_group,
        )
        copied.cuts, copied.turn = self.cuts, copy.deepcopy(self.turn, memo)
        mark_copies(self.module, self.cuts, self.shard_group, memo)
        return copied


class Expert:
    """Stands for the ``forward`` of an expert: on the ranks that have it not it gives zeros."""

    def __init__(self, module: nn.Module, held: Held, shard_group: ShardGroup, turn: Turn) -> None:
        self.module, self.held, self.shard_group, self.turn = module, held, shard_group, turn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.turn.runs or in_backward()):  # a checkpoint in the mixture runs it again on the way back
            raise UsageError(
                f"{self.held.name}, an expert that one rank has, is called by other code than that of the module whose "
                "experts ranks share: the others have nothing of it. Call that module, or keep it whole, "
                'weft.set_tensor_parallelism(module, False), or write "experts": "expert_tensor_parallel"'
            )
        with stream_of_part(self.shard_group, self.held.draws):
            if self.held.rank == self.shard_group.rank and not self.turn.without:
                with readable(self.module):
                    return type(self.module).forward(self.module, *args, **kwargs)
        like = tensors_in((args, kwargs))[0]
        kind, dtype = like.device.type, like.dtype
        if self.held.rounded and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        zeros = torch.zeros((*like.shape[:-1], self.held.width), dtype=dtype, device=like.device)
        if self.turn.without:
            return zeros
        with readable(self.module):
            own = [each for each in self.module.parameters() if each.requires_grad]
        return Nothing.apply(zeros, *own) if own and torch.is_grad_enabled() else zeros


class Beside:
    """Stands for the ``forward`` of a module whose result is added to those of experts: it counts once."""

    def __init__(self, module: nn.Module, shard_group: ShardGroup, turn: Turn) -> None:
        self.module, self.shard_group, self.turn = module, shard_group, turn
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        streams = streams_of(self.shard_group)
        if self.turn.without:
            zeros, after = self.turn.beside.pop(0)
            streams.restore(after)
            return zeros
        size = self.shard_group.size
        forward = self.own or MethodType(type(self.module).forward, self.module)
        if not (self.turn.runs or in_backward()):  # other code than the mixture's
            return forward(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), lambda tensor: alike(tensor, size))
        result = forward(*args, **kwargs)
        if self.turn.twice and self.turn.runs:
            zeros = map_tensors(result, torch.zeros_like)
            self.turn.beside.append((zeros, streams.capture(TORCH)))
        return map_tensors(
            result,
            lambda tensor: Share.apply(tensor, size) if tensor.is_floating_point() else tensor,
        )


def alike(tensor: Tensor, size: int) -> Tensor:
    """A tensor that all ranks compute alike, on its way out of the mixture, or to what is beside the experts."""
    return Alike.apply(tensor, size) if tensor.requires_grad and torch.is_grad_enabled() else tensor


@contextmanager
def readable(module: nn.Module) -> Iterator[None]:
    """Inside, the module's own code reads its parameters: this rank has all of them, or nothing."""
    guarded = [(each, table) for each in module.modules() if isinstance(table := each._parameters, Guarded)]
    try:
        for each, table in guarded:
            each.__dict__["_parameters"] = {name: dict.__getitem__(table, name) for name in table}
        yield
    finally:
        for each, table in guarded:
            each.__dict__["_parameters"] = table


def members(mixture: Mixture) -> dict[nn.Module, Expert | Beside]:
    """The functions that replace the ``forward`` of a mixture's experts, and of what is beside them."""
    shard_group, turn = mixture.shard_group, mixture.turn
    return {
        inner: Beside(inner, shard_group, turn)
        if held.rank is None
        else Expert(inner, held, shard_group, turn)
        for held in mixture.linear.held
        for inner in [mixture.module.get_submodule(held.name)]
    }


def cuts_of_mixture(module: nn.Module, linear: Linear) -> dict[str, Cut]:
    """The parameters that each rank holds, by name; those of the router stay whole and are left out."""
    return {
        f"{held.name}.{name}": Cut(0, tuple(value.shape[:1]), tuple(value.shape), held.rank)
        for held in linear.held
        if held.rank is not None
        for name, value in module.get_submodule(held.name).named_parameters()
    }


def misfit_of_mixture(module: nn.Module, linear: Linear, size: int) -> str:
    """Why the module cannot be split in this way; empty if it can."""
    for held in linear.held:
        try:
            module.get_submodule(held.name)
        except AttributeError:
            return f"it has no {held.name}"
        if held.rank is not None and not 0 <= held.rank < size:
            return f"its {held.name} is on rank {held.rank}"
    return "" if linear.held else "it has no experts"


def entered_all(tensors: Sequence[Any], shard_group: ShardGroup) -> dict[int, Tensor]:
    """By their ids, full tensors of which each rank computes other things; those without gradients are left out."""
    wanted = [*{id(each): each for each in tensors if each is not None and each.requires_grad}.values()]
    if not wanted or not torch.is_grad_enabled():
        return {}
    views = EnterAll.apply(shard_group, *wanted)
    return {id(tensor): view for tensor, view in zip(wanted, views, strict=True)}


# --- what autograd does ------------------------------------------------------------------------------------


class EnterAll(Quiet):
    """Full tensors on their way to the ranks' experts: their gradients are all-reduced, all in one message."""

    @staticmethod
    def forward(ctx: Any, shard_group: ShardGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard_group = shard_group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(gradients)
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            same = [n for n, each in enumerate(gradients) if each.dtype == dtype]
            flat = ctx.shard_group.all_reduce(torch.cat([gradients[n].reshape(-1) for n in same]))
            pieces = flat.split([gradients[n].numel() for n in same])
            for n, piece in zip(same, pieces, strict=True):
                found[n] = piece.view(gradients[n].shape)
        return None, *found


class Anchored(Quiet):
    """A tensor whose gradient's way leads to another one, too, which gets zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.shape = anchor.shape
        # kept, so that a checkpoint around the mixture runs it again up to here on all ranks, or on none
        ctx.save_for_backward(torch.zeros((), dtype=anchor.dtype, device=anchor.device))
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (zero,) = ctx.saved_tensors
        return gradient, zero.expand(ctx.shape)


class Alike(Quiet):
    """Tensors whose gradients are summed over ranks, and are to be their mean: all compute them alike, say."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


class Share(Quiet):
    """A share of what all ranks have, for they add it up; the gradient is that of the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int) -> Tensor:
        return tensor / size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Nothing(Quiet):
    """Zeros in place of what another rank's expert gives; the parameters, of which there is nothing, get gradients."""

    @staticmethod
    def forward(ctx: Any, zeros: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [each.detach() for each in parameters]
        return zeros

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(each) for each in ctx.like)
