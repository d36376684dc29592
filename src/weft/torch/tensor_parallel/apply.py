"""A model split in place: its parameters become parts, and calls of its linears and regions run on parts."""

from __future__ import annotations

import threading
from types import MethodType
from typing import Any

import torch
from torch import nn

from weft.errors import UsageError
from weft.torch.pytorch.private import take_plain_for_whole
from weft.torch.tensors.nested import replace

from .cuts import cut_in_place, is_cut, mark
from .functions import Functions, answer
from .linears import Entered, column, cuts_of, features, row
from .rules import as_whole
from .splits import COLUMN, Linear, Splits
from .team import Team, enter


class _Inside(threading.local):
    """The regions that run on this thread, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[Entered] = []


_inside = _Inside()


class SplitLinear:
    """Stands for a linear's ``forward``; in the module's dict, so that a copied module has its own."""

    def __init__(self, module: nn.Module, linear: Linear, team: Team) -> None:
        self.module, self.linear, self.team = module, linear, team
        self.cuts = cuts_of(module, linear)

    def __call__(self, input: Any) -> Any:
        if self.linear.kind == COLUMN:
            entered = _inside.entered[-1] if _inside.entered else enter
            return column(self.module, self.linear.blocks, input, self.team, entered)
        return row(self.module, input, self.team)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitLinear:
        copied = object.__new__(SplitLinear)
        memo[id(self)] = copied
        copied.module = memo[id(self.module)]
        copied.linear, copied.team, copied.cuts = self.linear, self.team, self.cuts
        for name, how in self.cuts.items():  # parameters are copied without their marks
            parameter = memo.get(id(self.module.get_parameter(name)))
            if parameter is not None:
                mark(parameter, how, self.team)
        return copied


class SplitRegion:
    """Stands for a region's ``forward``: nothing in parts comes out of it."""

    def __init__(self, module: nn.Module, team: Team) -> None:
        self.module, self.team = module, team
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own or MethodType(type(self.module).forward, self.module)
        _inside.entered.append(Entered())
        try:
            result = forward(*args, **kwargs)
        finally:
            _inside.entered.pop()
        return replace(result, as_whole, attributes=False)


def split(
    model: nn.Module, splits: Splits, group: Any, rank: int, size: int, device: torch.device
) -> Team | None:
    """Cut the parameters of the linears in ``splits``, in place, and let the model run in parts.

    Parameters stay the same objects, with this rank's part in them; gradients that they have are dropped. Every rank of
    the group calls this with a model that has the same parameters. A model that is split already stays as it is.

    Args:
        model: The model, whole.
        splits: What :func:`find` found on one of the ranks.
        group: The group of ``torch.distributed`` with the ranks of axis ``tp``.
        rank: This rank's number in the group.
        size: How many ranks the group has.
        device: Where the model runs.

    Returns:
        The ranks that hold the parts; None where nothing was to be split.

    Raises:
        UsageError: ``splits`` are for another number of ranks, or for a model with other linears. Nothing was changed.
    """
    linears = splits.linears()
    _check(model, splits, size)
    if not linears or any(is_cut(model.get_submodule(name).get_parameter("weight")) for name in linears):
        return None
    take_plain_for_whole()
    team = Team.of(group, rank, size, device)
    answer(Functions(team))
    for name, linear in linears.items():
        module = model.get_submodule(name)
        stands = SplitLinear(module, linear, team)
        for own, how in stands.cuts.items():
            cut_in_place(module.get_parameter(own), how, team)
        module.__dict__["forward"] = stands
    for region in splits.regions:
        module = model.get_submodule(region.name)
        module.__dict__["forward"] = SplitRegion(module, team)
    return team


def _check(model: nn.Module, splits: Splits, size: int) -> None:
    faults = []
    if splits.size != size:
        faults.append(f"it is for {splits.size} ranks, and axis tp has {size}")
    modules = dict(model.named_modules())
    for name, linear in splits.linears().items():
        if name not in modules or not hasattr(modules[name], "weight"):
            faults.append(f"the model has no linear {name}")
            continue
        if is_cut(modules[name].get_parameter("weight")):
            continue
        inputs, results = features(modules[name])
        blocks = linear.blocks or (results,)
        cut = blocks if linear.kind == COLUMN else (inputs,)
        if sum(blocks) != results or any(block % size for block in cut):
            faults.append(f"{name} has {inputs} inputs and {results} results, which do not fit")
    faults.extend(f"the model has no {r.name}" for r in splits.regions if r.name not in modules)
    if faults:
        raise UsageError(f"this split over axis tp does not belong to this model: {'; '.join(faults)}")
