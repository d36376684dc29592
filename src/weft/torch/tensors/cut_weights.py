"""Cut weights that something else than their module reads, inside a unit: refused, where the rest of a step sees them.

Units run as they are, with nothing between their operations and PyTorch. So the module itself looks: its class becomes
one of the same name, whose weights are properties. Inside a unit a property gives a :class:`Part`, which tells its
dtype and device, and refuses everything that would compute with a part as if it was the whole.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor, nn

from weft.errors import UsageError
from weft.torch.pytorch.torch_functions import METADATA

SHAPES = {Tensor.size, Tensor.shape.__get__, Tensor.numel}  # type: ignore[attr-defined]
_TOLD = METADATA - SHAPES


def _nowhere() -> bool:
    return False


_inside_unit: Callable[[], bool] = _nowhere


def ask(inside_unit: Callable[[], bool]) -> None:
    """Let `inside_unit` say whether a unit of a step runs on this thread."""
    global _inside_unit
    _inside_unit = inside_unit


def refuse_part(tensor: Tensor) -> NoReturn:
    """Say that a part cannot be read, and what to do instead."""
    raise UsageError(
        f"code outside of a cut module reads its weight, a part of shape {list(tensor.shape)}: what it computes "
        "would differ between the ranks that hold the others. Keep the module whole, "
        "weft.set_tensor_parallelism(module, False), or let the optimizer do it (weight_decay, say)"
    )


class Part(Tensor):
    """A weight of which this rank has a part (``of``), as code outside of its module sees it."""

    of: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _TOLD:
            refuse_part(next(each.of for each in _flat(args, kwargs) if isinstance(each, Part)))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _flat(args: Any, kwargs: Any) -> Iterable[Any]:
    for each in (*args, *(kwargs or {}).values()):
        yield from each if isinstance(each, (list, tuple)) else (each,)


def own(module: nn.Module, name: str) -> Any:
    """The module's own parameter, also inside a unit; None if it has none."""
    return module._parameters[name]


def guard(module: nn.Module, names: Iterable[str]) -> None:
    """Let nothing but :func:`own` read these parameters of the module inside a unit."""
    module.__class__ = _guarded(type(module), tuple(sorted(names)))


_known: dict[tuple[Any, tuple[str, ...]], type[nn.Module]] = {}


def _guarded(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    if (kind, names) in _known:
        return _known[kind, names]
    told: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    told["__reduce_ex__"] = _reduced
    made = type(kind.__name__, (kind,), {**told, **{name: _Weight(name) for name in names}})
    _known[kind, names] = made
    return made


def _reduced(module: Any, protocol: Any) -> Any:
    """As its own class says, for a class that nobody can import: by the class that it was made from."""
    kind, *_ = type(module).__bases__
    found = super(type(module), module).__reduce_ex__(protocol)
    if found[0] is not copyreg.__newobj__ or found[1] != (type(module),):  # type: ignore[attr-defined]
        return found
    names = tuple(name for name, each in vars(type(module)).items() if isinstance(each, _Weight))
    return (_made_again, (kind, names), *found[2:])


def _made_again(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made: nn.Module = object.__new__(_guarded(kind, names))
    return made


class _Weight:
    """The property. It has no setter that is ever called: ``nn.Module`` takes parameters by itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        parameters = module.__dict__["_parameters"]
        if self.name not in parameters:
            raise AttributeError(self.name)
        found = parameters[self.name]
        if found is None or not _inside_unit():
            return found
        part = found.detach().as_subclass(Part)
        part.of = found
        return part

    def __set__(self, module: Any, value: Any) -> None:
        raise AttributeError(f"{self.name} is a parameter that is cut over ranks")
