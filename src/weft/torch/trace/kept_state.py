"""The state that a script's code can reach and change: noted, and brought back after a dry run.

Code that counts, collects or caches would do so too often:

    history.append(loss.item())         a list that the step function knows
    self.calls += 1; self.mask = ...    attributes of the model's modules
    x.mul_(2)                           an argument, written in place

So before the first run everything is noted that the step function can reach by its own names: closures and globals of
its own file, arguments, modules, and in them containers, arrays, and objects of classes that the script or the model
defines, with the methods of modules. So are objects that hang on a tensor, as the scales of bitsandbytes do, or on a
module of their package.
Objects of other libraries are left alone, because their threads may change them meanwhile.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable, Iterable
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from weft.torch.calls.container_writes import fill
from weft.torch.calls.placeholders import Placeholder
from weft.torch.tensors.pytree import CONSTANTS

LARGE = 4096
"""In containers of more items than this the items themselves are not looked into."""
LEFT_ALONE = ("torch", "weft", "builtins")
"""Packages whose objects change by themselves."""
_ABSENT = object()


class Kept:
    """Notes what things hold, and brings all of that back as often as wanted.

    Args:
        homes: Names of the Python modules whose classes' objects are looked into.

    Attributes:
        parameters: Those that were reached, by id. They are only copied where something writes into them.
    """

    def __init__(self, homes: Iterable[str] = ()) -> None:
        self._homes = {home for home in homes if home.partition(".")[0] not in LEFT_ALONE}
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self.parameters: dict[int, nn.Parameter] = {}

    def bring_back(self) -> None:
        """Make all things hold again what they held when they were noted."""
        for undo in self._undo:
            undo()

    def knows(self, thing: Any) -> bool:
        """True if the thing was there when all was noted, so that it goes from one microbatch to the next."""
        return id(thing) in self._seen

    def note(self, thing: Any) -> None:
        """Note what ``thing`` holds, and what the things in it hold."""
        waiting = [thing]
        while waiting:
            one = waiting.pop()
            if not isinstance(one, CONSTANTS) and id(one) not in self._seen:
                self._seen[id(one)] = one  # so that the id stays its own
                waiting += self._look_into(one)

    def _look_into(self, thing: Any) -> Iterable[Any]:
        """Note what one thing holds; the things in it, to be looked into next."""
        if isinstance(thing, Placeholder):
            return ()
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        elif isinstance(thing, (dict, list, set, collections.deque)):
            return self._container(thing, vars(thing) if hasattr(thing, "__dict__") else None)
        elif isinstance(thing, tuple):
            return thing
        elif isinstance(thing, (torch.Generator, random.Random)) or type(thing).__module__.startswith(
            "numpy.random"
        ):
            self._generator(thing)
        elif isinstance(thing, bytearray) or type(thing).__qualname__ == "ndarray":
            self._array(thing)
        elif isinstance(thing, FunctionType):
            return self._function(thing)
        elif isinstance(thing, (classmethod, staticmethod)):
            return (thing.__func__,)
        elif isinstance(thing, MethodType):
            return (thing.__self__, thing.__func__)
        elif isinstance(thing, functools.partial):
            return (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, type):
            return self._class(thing) if thing.__module__ in self._homes else ()
        elif isinstance(thing, (nn.Module, SimpleNamespace)) or type(thing).__module__ in self._homes:
            return self._object(thing)
        return ()

    def _object(self, thing: Any) -> Iterable[Any]:
        """Note the attributes of an object of a class that is looked into."""
        kinds = [kind for kind in type(thing).__mro__ if kind.__module__ in self._homes]
        held = [
            (slot, slot.__get__(thing)) for kind in kinds for name, slot in vars(kind).items()
            if isinstance(slot, MemberDescriptorType) and hasattr(thing, name)
        ]  # fmt: skip
        self._undo += [functools.partial(slot.__set__, thing, before) for slot, before in held]
        inner = self._container(vars(thing)) if hasattr(thing, "__dict__") else ()
        if isinstance(thing, nn.Module) and (package := _package(thing)) not in LEFT_ALONE:
            self._homes |= {type(each).__module__ for each in inner if _package(each) == package}
        return [*inner, *(before for _, before in held), *kinds]

    def _class(self, kind: type) -> Iterable[Any]:
        """Note what a class holds. Of its methods those are looked into that a step runs: others may know all data."""
        before = dict(vars(kind))

        def undo() -> None:
            for name, value in before.items():
                if vars(kind).get(name, _ABSENT) is not value:
                    setattr(kind, name, value)

        self._undo.append(undo)
        runs = issubclass(kind, nn.Module)
        return [each for name, each in before.items() if runs or name == "__call__" or not callable(each)]

    def _array(self, array: Any) -> None:
        everything = slice(None) if isinstance(array, bytearray) else ...
        if everything is not ... or (array.flags.writeable and array.nbytes <= LARGE**2):  # more is data
            self._undo.append(functools.partial(array.__setitem__, everything, array.copy()))

    def _tensor(self, tensor: Tensor) -> Iterable[Any]:
        """Note a tensor, and what hangs on it."""
        held = [each for each in self._container(vars(tensor)) if _package(each) not in LEFT_ALONE]
        self._homes |= {type(each).__module__ for each in held}
        if isinstance(tensor, nn.Parameter):
            self.parameters[id(tensor)] = tensor
            return held
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return held
        content = tensor.detach().clone()

        def undo() -> None:  # kernels of batch norm do not count their writes as versions
            if not torch.equal(tensor, content):
                with torch.no_grad():
                    tensor.detach().copy_(content)

        self._undo.append(undo)
        return held

    def _generator(self, thing: Any) -> None:
        """A random generator of the script's own."""
        for get, put in (("get_state", "set_state"), ("getstate", "setstate")):
            if hasattr(thing, put):
                self._undo.append(functools.partial(getattr(thing, put), getattr(thing, get)()))
        inner = getattr(thing, "bit_generator", None)
        if inner is not None:
            state = inner.state
            self._undo.append(lambda: setattr(inner, "state", state))

    def _container(self, thing: Any, attributes: dict[str, Any] | None = None) -> Iterable[Any]:
        items = thing.copy() if type(thing) in (dict, list, set) else _items(thing)

        def undo() -> None:
            if not _same(thing, items):
                fill(thing, _by_key(items))

        self._undo.append(undo)
        inner = list(items.values() if isinstance(items, dict) else items) if len(items) <= LARGE else []
        return [*inner, attributes] if attributes else inner

    def _function(self, function: FunctionType) -> Iterable[Any]:
        """Note what a function reaches by its own names: cells of its closure, globals of its file."""
        if (function.__module__ or "").startswith("weft.torch."):  # a hook that watches the run
            return ()
        found = []
        for cell in function.__closure__ or ():
            found.append(self._cell(cell))
        if function.__module__ not in self._homes:
            return found
        everywhere = function.__globals__
        for name in _names(function.__code__):
            before = everywhere.get(name, _ABSENT)
            self._undo.append(functools.partial(_bind, everywhere, name, before))
            found.append(before)
        return found

    def _cell(self, cell: CellType) -> Any:
        try:
            before = cell.cell_contents
        except ValueError:  # empty so far
            return None

        def undo() -> None:
            if cell.cell_contents is not before:
                cell.cell_contents = before

        self._undo.append(undo)
        return before


def _package(thing: Any) -> str:
    """The name of the package that the class of a thing is from."""
    return type(thing).__module__.partition(".")[0]


def _items(thing: Any) -> Any:
    """The items of a container of a class of its own."""
    if isinstance(thing, dict):
        return dict(thing.items())
    return set(thing) if isinstance(thing, set) else list(thing)


def _same(thing: Any, items: Any) -> bool:
    if len(thing) != len(items):
        return False
    if isinstance(thing, dict):
        return all(a is c and b is d for (a, b), (c, d) in zip(thing.items(), items.items(), strict=True))
    if isinstance(thing, set):
        return bool(thing == items)
    return all(a is b for a, b in zip(thing, items, strict=True))


def _by_key(items: Any) -> dict[Any, Any]:
    if isinstance(items, dict):
        return items
    return dict.fromkeys(items) if isinstance(items, set) else dict(enumerate(items))


def _bind(names: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        names.pop(name, None)
    elif names.get(name, _ABSENT) is not before:
        names[name] = before


def _names(code: CodeType) -> set[str]:
    """The names that a function's code looks up or binds outside of it, those of functions inside it too."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def homes_of(function: Any, root: nn.Module) -> set[str]:
    """The Python modules of a step function, of the object that it is a method of, and of the classes of a model."""
    while isinstance(function, functools.partial):
        function = function.func
    inner, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
    own = {getattr(inner, "__module__", "__main__"), type(owner).__module__}
    return own | {type(module).__module__ for module in root.modules()}
