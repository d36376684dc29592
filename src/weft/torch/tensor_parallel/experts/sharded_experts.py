"""A module of experts run on this rank's part of each of them, or on some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.tensor_parallel.cuts import Cut, part_sizes
from weft.torch.tensor_parallel.shard_group import ShardGroup, enter, leave
from weft.torch.tensor_parallel.splits import OF_EXPERTS, ONCE, Linear
from weft.torch.tensors.cut_weights import own
from weft.torch.tensors.pytree import map_tensors, tensors_in

from .expert_parallel import entered_all


def run(
    module: nn.Module,
    weights: Mapping[str, Any],
    args: Any,
    kwargs: Any,
    numbers: Mapping[str, int] | None = None,
) -> Any:
    """Runs the module's class with other tensors in place of its parameters, and other ``numbers``; its result.

    Names with dots are those of modules inside of it. If there are none, the module keeps its parameters meanwhile, for
    another thread may run it. What it writes into its attributes stays.
    """
    if any("." in name for name in weights):
        with having(module, weights):
            return type(module).forward(module, *args, **kwargs)
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("forward", None)
    twin.__dict__.update(numbers or {})
    twin.__dict__["_parameters"] = dict(weights)
    before = dict(twin.__dict__)
    result = type(module).forward(twin, *args, **kwargs)
    written = {name: value for name, value in vars(twin).items() if before.get(name, twin) is not value}
    module.__dict__.update(written)
    return result


@contextmanager
def having(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module has other tensors in place of its parameters."""
    before: dict[str, tuple[dict[str, Any], str, Any]] = {}
    try:
        for name, value in weights.items():
            owner, _, own = name.rpartition(".")
            table: dict[str, Any] = module.get_submodule(owner)._parameters
            before[name] = table, own, dict.__getitem__(table, own)
            dict.__setitem__(table, own, value)
        yield
    finally:
        for table, own, value in before.values():
            dict.__setitem__(table, own, value)


@dataclass(frozen=True)
class Own:
    """The experts of one rank: ``count`` of ``total``, from ``first`` on."""

    first: int
    count: int
    total: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Own:
        """Those of a rank: as many as the others have, or one more."""
        sizes = part_sizes(total, size)
        return cls(sum(sizes[:rank]), sizes[rank], total)

    def numbers(self, module: nn.Module) -> dict[str, int]:
        """The numbers that the module keeps of its experts, by name, as they are for these."""
        return {
            name: self.count
            for name, value in vars(module).items()
            if type(value) is int and value == self.total and "expert" in name
        }


def run_own(module: nn.Module, own: Own, weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """The part of a module's result that a rank's experts add.

    Among the arguments is one tensor of whole numbers, ``[rows]`` or ``[rows, choices]``: the experts to which each row
    goes. The module's code gets each choice of an expert of this rank as a row of its own, and nothing else. So it
    computes what it computes for one expert a row. Where no such tensor is, each row goes to all experts, and what has
    a number for each expert along its last dimension is narrowed to this rank's.

    Raises:
        ValueError: The result has not a row for each row that goes in.
    """
    numbers = own.numbers(module)
    chosen = [
        each
        for each in tensors_in((args, kwargs))
        if each.dtype in (torch.int64, torch.int32) and each.ndim in (1, 2)
    ]
    if len(chosen) != 1 or not len(chosen[0]):

        def narrowed(tensor: Tensor) -> Tensor:
            if not tensor.ndim or tensor.shape[-1] != own.total:
                return tensor
            return tensor.narrow(-1, own.first, own.count)

        args, kwargs = map_tensors((args, kwargs), narrowed)
        return run(module, weights, args, kwargs, numbers)
    (choices,) = chosen
    places = ((choices >= own.first) & (choices < own.first + own.count)).nonzero(as_tuple=True)
    nothing = not len(places[0])
    if nothing:  # one row all the same, which counts nothing: gradients have to find their way
        places = tuple(each.new_zeros(1) for each in places)
    rows = places[0]

    def of_rows(tensor: Tensor) -> Tensor:
        if tensor is choices:
            taken = torch.zeros_like(tensor[places]) if nothing else tensor[places] - own.first
        elif tensor.shape == choices.shape:
            taken = tensor[places]
        elif tensor.ndim and len(tensor) == len(choices):
            return tensor.index_select(0, rows)
        else:
            return tensor
        return taken.unsqueeze(-1) if tensor.ndim == 2 else taken

    given, named = map_tensors((args, kwargs), of_rows)
    result = run(module, weights, given, named, numbers)
    if not isinstance(result, Tensor) or result.shape[:1] != rows.shape:
        raise ValueError("a module of experts gives something else than a row for each row")
    exact = result.float() if result.dtype in (torch.bfloat16, torch.float16) else result
    sums = exact.new_zeros((len(choices), *result.shape[1:]))
    return sums.index_add(0, rows, exact * 0 if nothing else exact).to(result.dtype)


def cuts_of_experts(module: nn.Module, linear: Linear) -> dict[str, Cut]:
    """The cuts of the module's parameters, by name; those that stay whole are left out."""
    return {
        part.name: Cut(part.dim, part.blocks, tuple(module.get_parameter(part.name).shape))
        for part in linear.parts
        if part.dim != ONCE
    }


def misfit(module: nn.Module, linear: Linear) -> str:
    """Why the module cannot be split in this way; empty if it can."""
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    for part in linear.parts:
        shape = shapes.get(part.name)
        if shape is None or (
            part.dim != ONCE and (part.dim >= len(shape) or sum(part.blocks) != shape[part.dim])
        ):
            return f"its {part.name} of shape {shape} does not fit"
    return "" if linear.parts else "it has no parts"


def run_sharded(module: nn.Module, linear: Linear, shard_group: ShardGroup, args: Any, kwargs: Any) -> Any:
    """Stands for the module's ``forward``: full tensors go in and come out."""
    if linear.by_rank():
        return _by_rank(module, linear, shard_group, args, kwargs)
    if any("." in part.name for part in linear.parts):
        return _around(module, linear, shard_group, args, kwargs)
    places = {part.name: part.dim for part in linear.parts}
    weights = {}
    for name in module._parameters:
        value = own(module, name)
        if value is not None and places.get(name, ONCE) == ONCE:
            value = enter(value, shard_group)
            value = value * 0 if name in places and shard_group.rank > 0 else value
        weights[name] = value
    args, kwargs = map_tensors((args, kwargs), lambda tensor: enter(tensor, shard_group))
    result = run(module, weights, args, kwargs)
    return map_tensors(result, lambda tensor: _all_reduced(tensor, shard_group))


def _around(module: nn.Module, linear: Linear, shard_group: ShardGroup, args: Any, kwargs: Any) -> Any:
    """As ``in_parts``, for weights that modules inside of it have."""
    places = {part.name: part.dim for part in linear.parts}
    weights: dict[str, Any] = {}
    for name, _ in module.named_parameters():
        owner, _, last = name.rpartition(".")
        weights[name] = own(module.get_submodule(owner), last)
    given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
    given += [value for name, value in weights.items() if places.get(name, ONCE) == ONCE]
    entered = entered_all(given, shard_group)
    for name, value in weights.items():
        if places.get(name, ONCE) != ONCE:
            weights[name] = value.view_as(value)  # without the mark of a part
            continue
        value = entered.get(id(value), value)
        weights[name] = value * 0 if name in places and shard_group.rank > 0 else value
    args, kwargs = map_tensors((args, kwargs), lambda each: entered.get(id(each), each))
    result = run(module, weights, args, kwargs)
    return map_tensors(result, lambda tensor: _all_reduced(tensor, shard_group))


def _by_rank(module: nn.Module, linear: Linear, shard_group: ShardGroup, args: Any, kwargs: Any) -> Any:
    cut = {part.name: sum(part.blocks) for part in linear.parts if part.dim == OF_EXPERTS}
    weights = {name: own(module, name) for name in module._parameters}
    given = [each for each in tensors_in((args, kwargs)) if each.is_floating_point()]
    given += [value for name, value in weights.items() if value is not None and name not in cut]
    entered = entered_all(given, shard_group)
    args, kwargs = map_tensors((args, kwargs), lambda each: entered.get(id(each), each))
    weights = {name: entered.get(id(value), value) for name, value in weights.items()}
    some = Own.of(next(iter(cut.values())), shard_group.rank, shard_group.size)
    result = run_own(module, some, weights, args, kwargs)
    return map_tensors(result, lambda tensor: _all_reduced(tensor, shard_group))


def _all_reduced(tensor: Tensor, shard_group: ShardGroup) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return leave(tensor.clone(memory_format=torch.contiguous_format), shard_group)
