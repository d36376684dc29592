"""Nested structures of tensors: walk them, replace tensors in them, describe them to other ranks.

Containers are lists, tuples (named ones too), dicts and their subclasses, dataclasses. Any other object is
opaque: tensors in its attributes are found and replaced in place, but it cannot be described to
another rank unless that rank holds the same object already (it came in as an argument).

A description is JSON: a list whose first item names the form.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import UsageError

_EMPTY = CellType()
CONSTANTS = (type(None), bool, int, float, str)
ATTRIBUTE_DEPTH = 3
DATA_DEPTH = 16
"""How deep dataclasses may lie in each other; what is deeper may be a circle."""


_FILLABLE = (MutableSequence, MutableMapping, MutableSet)


def is_walkable(thing: Any) -> bool:
    """Whether the attributes of an object are searched for tensors."""
    if isinstance(thing, (type, nn.Module, torch.Generator)) or callable(thing):
        return False
    return hasattr(thing, "__dict__") or bool(_slots_of(type(thing)))  # type: ignore[arg-type]


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    """The names of attributes that stand in no ``__dict__``."""
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object by name; classes with slots have no ``__dict__``."""
    if hasattr(thing, "__dict__"):
        return vars(thing)
    return {name: getattr(thing, name) for name in _slots_of(type(thing)) if hasattr(thing, name)}  # type: ignore[arg-type]


def modules_in(tree: Any) -> list[nn.Module]:
    """The modules in nested lists, tuples and dicts."""
    if isinstance(tree, nn.Module):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [module for item in items for module in modules_in(item)]


def replace(
    tree: Any, function: Callable[[Tensor], Tensor], depth: int = 0, *, attributes: bool = True
) -> Any:
    """``tree`` with ``function`` applied to its tensors; the same object where nothing changed.

    Containers that change are rebuilt with their type; attributes of opaque objects are set in place (left alone
    with ``attributes=False``).
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, CONSTANTS):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [replace(item, function, depth, attributes=attributes) for item in tree]
        if same_objects(items, tree):
            return tree
        return rebuild_sequence(type(tree), items)
    if isinstance(tree, dict):
        if not tree:
            return tree
        values = {key: replace(item, function, depth, attributes=attributes) for key, item in tree.items()}
        if same_objects(values.values(), tree.values()):
            return tree
        return rebuild_dict(type(tree), values, tree)
    is_data = dataclasses.is_dataclass(tree)
    limit = DATA_DEPTH if is_data else ATTRIBUTE_DEPTH
    if (attributes or is_data) and depth < limit and is_walkable(tree):
        changed = {}
        for name, item in list(attributes_of(tree).items()):
            new = replace(item, function, depth + 1, attributes=attributes)
            if new is not item:
                changed[name] = new
        if changed and is_data:
            return rebuild_dataclass(type(tree), {**attributes_of(tree), **changed})
        for name, item in changed.items():
            object.__setattr__(tree, name, item)
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in a tree of containers."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    replace(tree, note, attributes=False)
    return found


def captured_in(tree: Any) -> list[Tensor]:
    """The tensors that functions among the arguments of a call know by themselves: their closures, what is bound."""
    found: list[Tensor] = []
    waiting = [(tree, False)]
    seen = set()
    while waiting:
        thing, inside = waiting.pop()
        if isinstance(thing, CONSTANTS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found += [thing] if inside else []
        elif isinstance(thing, (list, tuple, dict)):
            waiting += [(item, inside) for item in (thing.values() if isinstance(thing, dict) else thing)]
        elif isinstance(thing, functools.partial):
            waiting += [(item, True) for item in (thing.func, thing.args, thing.keywords)]
        elif isinstance(thing, FunctionType):
            # Reading an empty cell raises; cells compare by their contents, and an empty one equals an empty one only.
            cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != _EMPTY]
            waiting += [(item, True) for item in (cells, thing.__defaults__, thing.__kwdefaults__)]
    return found


def same_objects(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two collections of one length hold the same objects in the same order."""
    return all(map(is_, some, others))


def rebuild_sequence(kind: type, items: list[Any]) -> Any:
    """A list or tuple of that kind: named tuples and torch.return_types too."""
    if hasattr(kind, "_fields"):
        return kind(*items)
    return kind(items)


def rebuild_dict(kind: type, values: dict[Any, Any], like: Any = None) -> Any:
    if kind is dict:
        return values
    if dataclasses.is_dataclass(kind):
        return kind(**values)
    if like is not None and not dataclasses.is_dataclass(kind):
        new: Any
        try:
            new = like.copy()
        except Exception:
            new = kind()
        if type(new) is not kind:
            new = kind()
    else:
        new = kind()
    for key, item in values.items():
        new[key] = item
    return new


def rebuild_dataclass(kind: type, values: dict[str, Any]) -> Any:
    new: Any = object.__new__(kind)
    for name, item in values.items():
        object.__setattr__(new, name, item)
    return new


class Describer:
    """Turns one output into its description, numbering tensors in order of appearance.

    ``inputs``: what the call was given, so that an object passed through is described as such.
    """

    def __init__(self, inputs: Any) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._opaque = {id(thing): number for number, thing in enumerate(opaque_objects(inputs))}

    def describe(self, tree: Any) -> list[Any]:
        if isinstance(tree, Tensor):
            number = self._numbers.get(id(tree))
            if number is not None:
                return ["same", number]
            self._numbers[id(tree)] = len(self.tensors)
            self.tensors.append(tree)
            return ["tensor", describe_tensor(tree)]
        if isinstance(tree, torch.Size):
            return ["size", list(tree)]
        if isinstance(tree, CONSTANTS):
            return ["constant", tree]
        if isinstance(tree, (list, tuple)):
            items = [self.describe(item) for item in tree]
            return ["sequence", class_name(type(tree)), items]
        if isinstance(tree, dict):
            return [
                "dict",
                class_name(type(tree)),
                [[self.describe(key), self.describe(item)] for key, item in tree.items()],
            ]
        if id(tree) in self._opaque:
            return ["input", self._opaque[id(tree)]]
        if isinstance(tree, (torch.dtype, torch.device)):
            return ["torch", type(tree).__name__, str(tree)]
        if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            named = {name: self.describe(item) for name, item in attributes_of(tree).items()}
            return ["dataclass", class_name(type(tree)), named]
        raise UsageError(
            f"returns a {type(tree).__qualname__}, which cannot be described to the other ranks; return tensors, "
            "numbers, strings, lists, tuples, dicts or dataclasses of these, or keep the module that calls it "
            "in one piece: weft.set_partition(parent, index)"
        )


def describe_tensor(tensor: Tensor) -> list[Any]:
    """[dtype, shape, strides, whether it needs a gradient] of ``tensor``."""
    if tensor.is_nested:
        raise UsageError(
            "returns a nested tensor, which cannot be described to the other ranks: return its values() and offsets(), "
            "or keep the module that calls it in one piece: weft.set_partition(parent, index)"
        )
    strides = list(tensor.stride()) if tensor.layout == torch.strided else None
    return [str(tensor.dtype)[6:], list(tensor.shape), strides, tensor.requires_grad]


def build(
    description: list[Any], tensors: list[Tensor], make: Callable[[list[Any]], Tensor], inputs: Any
) -> Any:
    """The structure that ``description`` describes; ``make`` gives a tensor for each tensor's description.

    Tensors made are appended to ``tensors`` in the describer's order.
    """
    form = description[0]
    if form == "tensor":
        tensors.append(make(description[1]))
        return tensors[-1]
    if form == "same":
        return tensors[description[1]]
    if form == "constant":
        return description[1]
    if form == "size":
        return torch.Size(description[1])
    if form == "sequence":
        items = [build(item, tensors, make, inputs) for item in description[2]]
        return rebuild_sequence(find_class(description[1], (list, tuple)), items)
    if form == "dict":
        values = {
            build(key, tensors, make, inputs): build(item, tensors, make, inputs)
            for key, item in description[2]
        }
        return rebuild_dict(find_class(description[1], (dict,)), values)
    if form == "input":
        return opaque_objects(inputs)[description[1]]
    if form == "torch":
        return (
            torch.device(description[2]) if description[1] == "device" else getattr(torch, description[2][6:])
        )
    values = {name: build(item, tensors, make, inputs) for name, item in description[2].items()}
    return rebuild_dataclass(find_class(description[1], (object,)), values)


def opaque_objects(tree: Any) -> list[Any]:
    """Objects in ``tree`` that are neither tensors, constants nor containers, in a fixed order."""
    found: list[Any] = []

    def walk(item: Any) -> None:
        if isinstance(item, (Tensor, *CONSTANTS)):
            return
        if isinstance(item, (list, tuple)):
            for part in item:
                walk(part)
        elif isinstance(item, dict):
            for part in item.values():
                walk(part)
        else:
            found.append(item)

    walk(tree)
    return found


def fillable_in(tree: Any) -> list[Any]:
    """What may be filled in ``tree``: lists, dicts and sets, however deep they lie in each other and in tuples, and
    objects whose attributes are searched for tensors."""
    found: dict[int, Any] = {}
    waiting = [(tree, 0)]
    while waiting:
        thing, depth = waiting.pop()
        if isinstance(thing, (Tensor, *CONSTANTS)) or id(thing) in found:
            continue
        is_object = (
            not isinstance(thing, (*_FILLABLE, tuple)) and depth < ATTRIBUTE_DEPTH and is_walkable(thing)
        )
        if is_object or isinstance(thing, _FILLABLE):
            found[id(thing)] = thing
        elif not isinstance(thing, tuple):
            continue
        waiting += [(item, depth + is_object) for item in items_of(thing)]
    return list(found.values())


def items_of(thing: Any) -> list[Any]:
    """What a container or an object holds."""
    if isinstance(thing, MutableMapping):
        return [*thing, *thing.values()]
    return list(thing if isinstance(thing, (*_FILLABLE, tuple)) else attributes_of(thing).values())


def has_objects(tree: Any) -> bool:
    """Whether there are objects in ``tree`` whose attributes may change: caches, stores."""
    return any(is_walkable(thing) for thing in opaque_objects(tree))


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str, bases: tuple[type, ...]) -> type:
    """The class of that name among the modules already imported here; nothing is imported for it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not issubclass(found, bases):
        raise UsageError(
            f"a module on another rank returned a {path} of {module}, which this rank does not know: "
            "define it at the top level of a module that every rank imports"
        )
    return found
