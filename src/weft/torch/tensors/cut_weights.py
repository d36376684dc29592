"""Weights that cannot be read just now: parts that something else than their module reads inside a unit, and weights of
which this rank has a share, outside of the unit for which they are gathered. They are refused, where a step sees them.

Units run as they are, with nothing between their operations and PyTorch. So the module's own table of parameters looks:
inside a unit it gives a :class:`Part`, by whichever way somebody asks (``module.weight``, ``module.parameters()``). A
part gives dtype, device and the like, and refuses everything that would take it for the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.pytorch.torch_functions import METADATA
from weft.torch.tensors.marks import AWAY, CUT
from weft.torch.tensors.pytree import tensors_in

SHAPES = {
    Tensor.shape.__get__, Tensor.nbytes.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__,  # type: ignore[attr-defined]
    Tensor.stride, Tensor.is_same_size, torch.numel, torch.is_same_size,
}  # fmt: skip
"""Functions whose results differ between a part and the whole."""
_COMMON = METADATA - SHAPES
"""Functions whose results are the same for a part and the whole."""


def _nowhere() -> bool:
    return False


_inside_unit: Callable[[], bool] = _nowhere
_between_units: Callable[[], bool] = _nowhere


def ask(inside_unit: Callable[[], bool], between_units: Callable[[], bool]) -> None:
    """Let these say whether a unit of a step runs on this thread, or the step's code outside of units."""
    global _inside_unit, _between_units
    _inside_unit, _between_units = inside_unit, between_units


def inside_unit() -> bool:
    """True if a unit of a step runs on this thread."""
    return _inside_unit()


class Gatherer(Protocol):
    """The mark of a parameter that has no values just now: it was given back."""

    name: str
    setting: str

    def come(self) -> bool:
        """Let the parameter have its values if this is a moment for that; whether it is."""
        ...


def refuse_part(tensor: Tensor) -> NoReturn:
    """Say that a part cannot be read, and what to do instead."""
    away: Gatherer | None = getattr(tensor, AWAY)
    if away is not None:
        raise UsageError(
            f"code outside of {away.name} reads a weight of shape {list(tensor.shape)} that belongs to it, and has "
            f"values only while that module runs. Let the code use the module itself, or write {away.setting}"
        )
    raise UsageError(
        f"code outside of a cut module reads its weight, a part of shape {list(tensor.shape)}: what it computes "
        "would differ between the ranks that hold the others. Keep the module whole, "
        "weft.set_tensor_parallelism(module, False), or let the optimizer do it (weight_decay, say)"
    )


def check_call(name: str) -> None:
    """Refuse a call of a cut module that comes from the step's code, and not from the unit that the module is in.

    Raises:
        UsageError: It does.
    """
    if _between_units():
        raise UsageError(
            f"{name} is cut over ranks, and the step's code calls it by itself, where nothing puts the parts together: "
            "call the model, or a larger module of it, or keep this one whole, "
            "weft.set_tensor_parallelism(module, False). Outside of steps model.module(...) works as in one process, "
            'where all ranks call it and "partitions" is 1'
        )


class Part(Tensor):
    """Stands for a parameter, ``of``, of which this rank has a part, where code outside of its module asks for it."""

    of: Tensor
    _is_param = True  # so that isinstance() takes it for an nn.Parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COMMON:
            refuse_part(next(each.of for each in tensors_in((args, kwargs)) if isinstance(each, Part)))
        return func(*(each.of if isinstance(each, Part) else each for each in args), **(kwargs or {}))


_parts: WeakValueDictionary[int, Part] = WeakValueDictionary()


def _part(parameter: Tensor) -> Part:
    """The same one for a parameter that several modules share: they differ by identity."""
    found = _parts.get(id(parameter))
    if found is None:
        found = _parts[id(parameter)] = torch.empty(0).as_subclass(Part)
        found.of = parameter
        found._weft_owner = parameter._weft_owner  # type: ignore[attr-defined]  # where a function with its module runs
    return found


def _seen(parameter: Any) -> Any:
    """The parameter as code outside of its module sees it."""
    if parameter is None:
        return None
    away: Gatherer | None = getattr(parameter, AWAY)
    if (getattr(parameter, CUT) is None and away is None) or not _inside_unit():
        return parameter
    if away is not None and away.come():
        return parameter
    return _part(parameter)


class Guarded(dict[str, Any]):
    """A module's table of parameters, some of which cannot be read just now; see the module."""

    def __getitem__(self, name: str) -> Any:
        return _seen(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return _seen(super().get(name, default))

    def values(self) -> Any:
        return [_seen(each) for each in super().values()]

    def items(self) -> Any:
        return [(name, _seen(each)) for name, each in super().items()]


def guard(module: nn.Module) -> None:
    """Let nothing but :func:`own` read the parameters of the module that are cut, or given back, inside a unit."""
    if not isinstance(module._parameters, Guarded):
        module.__dict__["_parameters"] = Guarded(module._parameters)


def own(module: nn.Module, name: str) -> Any:
    """The module's own parameter, also inside a unit; None if it has none."""
    return dict.__getitem__(module._parameters, name)
