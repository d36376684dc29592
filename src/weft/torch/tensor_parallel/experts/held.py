"""A mixture whose experts are modules: each rank has some of them, and runs these only.

All ranks run the mixture's own code, on the same inputs, with the same router. An expert of another rank gives zeros.
So each rank has its experts' share of the result, and the ranks add up once, where the mixture ends. Gradients of what
goes in, and of the router's weights, are added up once as well.

    inputs, router's weights -- EnterAll --> own code: experts --> (zeros from others) -- leave --> result
                                    |        modules beside --> one part of it in each rank --^
                                    '-----> what all compute alike (scores of a router) -- Alike --> result
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.errors import UsageError
from weft.torch.tensor_parallel.cuts import Cut, mark
from weft.torch.tensor_parallel.rules import as_whole, stream_of_part
from weft.torch.tensor_parallel.splits import Held, Linear
from weft.torch.tensor_parallel.spread import plain
from weft.torch.tensor_parallel.team import Quiet, Team, leave
from weft.torch.tensors.cut_weights import Guarded
from weft.torch.tensors.nested import replace, tensors_in


class Mixture:
    """Stands for the ``forward`` of a module around experts: whole tensors go in and come out."""

    def __init__(self, module: nn.Module, linear: Linear, team: Team) -> None:
        self.module, self.linear, self.team = module, linear, team
        self.cuts = cuts_of_mixture(module, linear)
        apart = {id(value) for each in linear.held for value in module.get_submodule(each.name).parameters()}
        self.shared = [
            (owner, name)
            for owner in module.modules()
            for name, value in owner.named_parameters(recurse=False)
            if id(value) not in apart
        ]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = replace((args, kwargs), lambda each: as_whole(plain(each)), attributes=False)
        given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
        tables: list[tuple[dict[str, Any], str]] = [(owner._parameters, name) for owner, name in self.shared]
        weights = [table[name] for table, name in tables]
        entered = entered_all([*given, *weights], self.team)
        args, kwargs = replace((args, kwargs), lambda each: entered.get(id(each), each), attributes=False)
        try:
            for (table, name), weight in zip(tables, weights, strict=True):
                dict.__setitem__(table, name, entered.get(id(weight), weight))
            result = type(self.module).forward(self.module, *args, **kwargs)
        finally:
            for (table, name), weight in zip(tables, weights, strict=True):
                dict.__setitem__(table, name, weight)
        return self._together(result, next(iter(entered.values()), None))

    def _together(self, result: Any, anchor: Tensor | None) -> Any:
        """What the ranks give together. ``anchor``: leads to what has entered, also where no own expert ran."""
        flags = iter(self.linear.blocks)

        def one(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            flag = next(flags, None)
            if flag is None:
                raise UsageError(
                    f"{type(self.module).__name__}, whose experts ranks share, gives more tensors than it did in the "
                    'first microbatch: write "experts": "parts"'
                )
            if not flag:
                return Alike.apply(tensor, self.team.size) if tensor.requires_grad else tensor
            if anchor is not None:
                tensor = Anchored.apply(tensor, anchor)
            return leave(tensor.clone(memory_format=torch.contiguous_format), self.team)

        return replace(result, one, attributes=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mixture:
        copied = memo[id(self)] = Mixture(memo[id(self.module)], self.linear, self.team)
        copied.cuts = self.cuts
        for name, how in self.cuts.items():  # parameters are copied without their marks
            parameter = memo.get(id(self.module.get_parameter(name)))
            if parameter is not None:
                mark(parameter, how, self.team)
        return copied


class Expert:
    """Stands for the ``forward`` of an expert: on the ranks that have it not it gives zeros."""

    def __init__(self, module: nn.Module, held: Held, team: Team) -> None:
        self.module, self.held, self.team = module, held, team

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with stream_of_part(self.team, self.held.draws and self.module.training):
            if self.held.rank == self.team.rank:
                with readable(self.module):
                    return type(self.module).forward(self.module, *args, **kwargs)
        like = tensors_in((args, kwargs))[0]
        kind, dtype = like.device.type, like.dtype
        if self.held.rounded and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        zeros = torch.zeros((*like.shape[:-1], self.held.width), dtype=dtype, device=like.device)
        with readable(self.module):
            own = [each for each in self.module.parameters() if each.requires_grad]
        return Nothing.apply(zeros, *own) if own and torch.is_grad_enabled() else zeros


class Beside:
    """Stands for the ``forward`` of a module whose result is added to those of experts: it counts once."""

    def __init__(self, module: nn.Module, team: Team) -> None:
        self.module, self.team = module, team
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size = self.team.size
        forward = self.own or MethodType(type(self.module).forward, self.module)

        def alike(tensor: Tensor) -> Tensor:
            return Alike.apply(tensor, size) if tensor.requires_grad and torch.is_grad_enabled() else tensor

        args, kwargs = replace((args, kwargs), alike, attributes=False)
        return replace(
            forward(*args, **kwargs),
            lambda tensor: Share.apply(tensor, size) if tensor.is_floating_point() else tensor,
            attributes=False,
        )


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


def members(module: nn.Module, linear: Linear, team: Team) -> dict[nn.Module, Expert | Beside]:
    """What stands for the ``forward`` of a mixture's experts, and of what is beside them; nothing for other modules."""
    return {
        inner: Beside(inner, team) if held.rank is None else Expert(inner, held, team)
        for held in linear.held
        for inner in [module.get_submodule(held.name)]
    }


def cuts_of_mixture(module: nn.Module, linear: Linear) -> dict[str, Cut]:
    """Which rank has what of the parameters, by name; those of the router stay whole and are left out."""
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


def entered_all(tensors: Sequence[Any], team: Team) -> dict[int, Tensor]:
    """By their ids, whole tensors of which each rank computes other things; those without gradients are left out."""
    wanted = [*{id(each): each for each in tensors if each is not None and each.requires_grad}.values()]
    if not wanted or not torch.is_grad_enabled():
        return {}
    views = EnterAll.apply(team, *wanted)
    return {id(tensor): view for tensor, view in zip(wanted, views, strict=True)}


# --- what autograd does ------------------------------------------------------------------------------------


class EnterAll(Quiet):
    """Whole tensors on their way to the ranks' experts: their gradients are added up, all in one message."""

    @staticmethod
    def forward(ctx: Any, team: Team, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.team = team
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = [None] * len(gradients)
        for dtype in dict.fromkeys(each.dtype for each in gradients):
            same = [n for n, each in enumerate(gradients) if each.dtype == dtype]
            flat = ctx.team.add_up(torch.cat([gradients[n].reshape(-1) for n in same]))
            pieces = flat.split([gradients[n].numel() for n in same])
            for n, piece in zip(same, pieces, strict=True):
                found[n] = piece.view(gradients[n].shape)
        return None, *found


class Anchored(Quiet):
    """A tensor whose gradient's way leads to another one, too, which gets zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.zero = torch.zeros((), dtype=anchor.dtype, device=anchor.device).expand(anchor.shape)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.zero


class Alike(Quiet):
    """What all ranks compute alike: each takes its share of the gradient, for these are added up."""

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
