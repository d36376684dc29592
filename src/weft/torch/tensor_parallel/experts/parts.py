"""A module of experts run on this rank's part of each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.tensor_parallel.cuts import Cut
from weft.torch.tensor_parallel.splits import ONCE, Linear
from weft.torch.tensor_parallel.team import Team, enter, leave
from weft.torch.tensors.cut_weights import own
from weft.torch.tensors.nested import replace


def run(module: nn.Module, weights: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """What the module's class computes with other tensors in place of its parameters.

    The module itself stays as it is, for another thread may run it.
    """
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__.pop("forward", None)
    twin.__dict__["_parameters"] = dict(weights)
    return type(module).forward(twin, *args, **kwargs)


def cuts_of_experts(module: nn.Module, linear: Linear) -> dict[str, Cut]:
    """How the module's parameters are cut, by name; those that stay whole are left out."""
    return {
        part.name: Cut(part.dim, part.blocks, tuple(module.get_parameter(part.name).shape))
        for part in linear.parts
        if part.dim != ONCE
    }


def misfit(module: nn.Module, linear: Linear) -> str:
    """Why the module cannot be split in this way; empty if it can."""
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}
    for part in linear.parts:
        shape = shapes.get(part.name)
        if shape is None or (
            part.dim != ONCE and (part.dim >= len(shape) or sum(part.blocks) != shape[part.dim])
        ):
            return f"its {part.name} of shape {shape} does not fit"
    return "" if linear.parts else "it has no parts"


def in_parts(module: nn.Module, linear: Linear, team: Team, args: Any, kwargs: Any) -> Any:
    """Stands for the module's ``forward``: whole tensors go in and come out."""
    places = {part.name: part.dim for part in linear.parts}
    weights = {}
    for name in module._parameters:
        value = own(module, name)
        if value is not None and places.get(name, ONCE) == ONCE:
            value = enter(value, team)
            value = value * 0 if name in places and team.rank > 0 else value
        weights[name] = value
    args, kwargs = replace((args, kwargs), lambda tensor: enter(tensor, team), attributes=False)
    result = run(module, weights, args, kwargs)
    return replace(result, lambda tensor: _added_up(tensor, team), attributes=False)


def _added_up(tensor: Tensor, team: Team) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return leave(tensor.clone(memory_format=torch.contiguous_format), team)
