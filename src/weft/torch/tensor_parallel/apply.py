"""A model split in place: its parameters become parts, and calls of its linears and regions run on parts."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.errors import UsageError
from weft.torch.pytorch.private_dtensor import take_plain_as_replicated
from weft.torch.tensors.cut_weights import check_call, guard
from weft.torch.tensors.pytree import map_arguments, map_tensors

from .attention import attend, forget_shortcuts, why_whole
from .cuts import cut_in_place, is_cut, mark_copies
from .experts import Mixture, members, misfit, misfit_of_mixture, run_sharded
from .functions import Functions, answer
from .linears import Entered, column, cuts_of, row
from .rules import as_full_tensor
from .shard_group import ShardGroup, shard_group_of
from .sharded_activations import enters, plain
from .splits import COLUMN, EXPERTS, HEADS, MIXTURE, ONCE, ROW, VOCABULARY, Linear, Splits, features
from .vocabulary import LookedUp, scores
from .vocabulary import why_whole as why_whole_vocabulary


class _Inside(threading.local):
    """The regions that run on this thread, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[Entered] = []


_inside = _Inside()


class SplitLinear:
    """Stands for a linear's ``forward``; in the module's dict, so that a copied module has its own."""

    def __init__(
        self,
        module: nn.Module,
        linear: Linear,
        shard_group: ShardGroup,
        stays_sharded: bool = False,
        name: str = "",
    ) -> None:
        self.module, self.linear, self.shard_group, self.stays_sharded = (
            module,
            linear,
            shard_group,
            stays_sharded,
        )
        self.name = name
        self.cuts = cuts_of(module, linear)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check_call(self.name)
        if self.linear.kind == HEADS:
            module: Any = self.module
            args, kwargs = map_arguments((args, kwargs), lambda each: as_full_tensor(plain(each)))
            return attend(module, self.shard_group, Entered(), *args, **kwargs)
        if self.linear.kind == EXPERTS:
            args, kwargs = map_arguments((args, kwargs), lambda each: as_full_tensor(plain(each)))
            return run_sharded(self.module, self.linear, self.shard_group, args, kwargs)
        if self.linear.kind == VOCABULARY:
            args, kwargs = map_arguments((args, kwargs), as_full_tensor)
            if not isinstance(self.module, nn.Embedding):
                return scores(self.module, self.shard_group, self.stays_sharded, *args, **kwargs)
            with LookedUp(self.module, self.shard_group, self.stays_sharded):
                return type(self.module).forward(self.module, *args, **kwargs)
        (given,) = (*args, *kwargs.values())
        if self.linear.kind == ROW:
            return row(self.module, given, self.shard_group, self.stays_sharded)
        entered = _inside.entered[-1] if _inside.entered else enters
        return column(self.module, given, self.linear.blocks, self.shard_group, entered)

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitLinear:
        copied = object.__new__(SplitLinear)
        memo[id(self)] = copied
        copied.module = memo[id(self.module)]
        copied.linear, copied.shard_group, copied.cuts = self.linear, self.shard_group, self.cuts
        copied.stays_sharded, copied.name = self.stays_sharded, self.name
        mark_copies(self.module, self.cuts, self.shard_group, memo)
        return copied


class SplitRegion:
    """Stands for a region's ``forward``: no shard comes out of it."""

    def __init__(self, module: nn.Module, shard_group: ShardGroup) -> None:
        self.module, self.shard_group = module, shard_group
        self.own = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.own or MethodType(type(self.module).forward, self.module)
        _inside.entered.append(Entered())
        try:
            result = forward(*args, **kwargs)
        finally:
            _inside.entered.pop()
        return map_tensors(result, self._whole)

    def _whole(self, tensor: Tensor) -> Tensor:
        other = (
            isinstance(tensor, DTensor) and shard_group_of(tensor) is not self.shard_group
        )  # sharded along positions
        return tensor if other else as_full_tensor(tensor)


def split(
    model: nn.Module, splits: Splits, group: Any, rank: int, size: int, device: torch.device,
    timeout: timedelta | None = None,
) -> ShardGroup | None:  # fmt: skip
    """Cut the parameters of the linears in ``splits``, in place, and let the model run on shards.

    Parameters stay the same objects, with this rank's part in them; gradients that they have are dropped. Every rank of
    the group calls this with a model that has the same parameters. A model that is split already stays as it is.

    Args:
        model: The model, whole.
        splits: What :func:`find` found on one of the ranks.
        group: The group of ``torch.distributed`` with the ranks of axis ``tp``.
        rank: This rank's number in the group.
        size: How many ranks the group has.
        device: Where the model runs.
        timeout: After which time another rank's silence in a sum is an error.

    Returns:
        The ranks that hold the parts; None where nothing was to be split.

    Raises:
        UsageError: ``splits`` are for another number of ranks, or for a model with other linears. Nothing was changed.
    """
    linears = splits.linears()
    _check(model, splits, size)
    if not linears or any(is_cut(_weight(model.get_submodule(name), how)) for name, how in linears.items()):
        return None
    take_plain_as_replicated()
    shard_group = ShardGroup.of(group, rank, size, device, timeout)
    answer(Functions(shard_group))
    mixtures: list[Mixture] = []
    for name, linear in linears.items():
        module = model.get_submodule(name)
        stands: Any = SplitLinear(module, linear, shard_group, name in splits.stays_sharded, name)
        if linear.kind == MIXTURE:
            stands = Mixture(module, linear, shard_group)
            mixtures.append(stands)
        for own, how in stands.cuts.items():
            if not is_cut(module.get_parameter(own)):  # modules share it
                cut_in_place(module.get_parameter(own), how, shard_group)
        module.__dict__["forward"] = stands
        for owner in {own.rpartition(".")[0] for own in stands.cuts}:
            guard(module.get_submodule(owner))
    forget_shortcuts(model, {id(model.get_submodule(name)) for name in linears})
    for region in splits.regions:
        module = model.get_submodule(region.name)
        if region.name in linears and linears[region.name].kind != COLUMN:
            continue
        module.__dict__["forward"] = SplitRegion(module, shard_group)
    for mixture in mixtures:
        for inner, stands_inside in members(mixture).items():
            inner.__dict__["forward"] = stands_inside
    return shard_group


def _weight(module: Any, linear: Linear) -> Any:
    """The parameter that shows whether the module is split; None if it is nothing that weft splits."""
    if linear.kind == MIXTURE:
        held = next((each.name for each in linear.held if each.rank is not None), "")
        inside = dict(module.named_parameters())
        return next((value for name, value in inside.items() if held and name.startswith(f"{held}.")), None)
    if linear.kind == EXPERTS:
        cut = next((part.name for part in linear.parts if part.dim != ONCE), "")
        return dict(module.named_parameters()).get(cut)
    if isinstance(module, nn.MultiheadAttention):
        return module.in_proj_weight
    return dict(module.named_parameters(recurse=False)).get("weight")


def _check(model: nn.Module, splits: Splits, size: int) -> None:
    faults = []
    if splits.size != size:
        faults.append(f"it is for {splits.size} ranks, and axis tp has {size}")
    modules = dict(model.named_modules())
    for name, linear in splits.linears().items():
        module = modules.get(name)
        if module is None or _weight(module, linear) is None:
            faults.append(f"the model has no linear {name}")
        elif not is_cut(_weight(module, linear)) and (fault := _misfit(module, linear, size)):
            faults.append(f"{name}: {fault}")
    faults.extend(f"the model has no {r.name}" for r in splits.regions if r.name not in modules)
    if faults:
        raise UsageError(f"this split over axis tp does not belong to this model: {'; '.join(faults)}")


def _misfit(module: nn.Module, linear: Linear, size: int) -> str:
    """Why the module cannot be split in this way; empty if it can."""
    if isinstance(module, nn.MultiheadAttention) and linear.kind == HEADS:
        return why_whole(module, size)
    if linear.kind == VOCABULARY:
        return why_whole_vocabulary(module, size)
    if linear.kind == EXPERTS:
        return misfit(module, linear)
    if linear.kind == MIXTURE:
        return misfit_of_mixture(module, linear, size)
    if isinstance(module, (nn.MultiheadAttention, nn.Embedding)) or linear.kind == HEADS:
        return "it is of another kind"
    inputs, results = features(module)
    blocks = linear.blocks or (results,)
    cut = blocks if linear.kind == COLUMN else (inputs,)
    if sum(blocks) != results or any(block % size for block in cut):
        return f"its {inputs} inputs and {results} results do not fit"
    return ""
