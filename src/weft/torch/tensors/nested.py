"""Nested structures of tensors: walk them, replace tensors in them, rebuild containers.

Containers are lists, tuples (named ones too), dicts and their subclasses, and dataclasses. Any other object is opaque:
tensors in the attributes of an opaque object are found, and replaced in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_EMPTY = CellType()
CONSTANTS = (type(None), bool, int, float, str)
"""Types of values that hold no tensors and do not change."""
ATTRIBUTE_DEPTH = 3
"""How many opaque objects may lie in each other; tensors in deeper ones are not looked for."""
DATA_DEPTH = 16
"""How many dataclasses may lie in each other; deeper ones may form a circle."""


def is_walkable(thing: Any) -> bool:
    """True if the attributes of an object are searched for tensors."""
    if isinstance(thing, (type, nn.Module, torch.Generator)) or callable(thing):
        return False
    return hasattr(thing, "__dict__") or bool(_slots_of(type(thing)))  # type: ignore[arg-type]


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the attributes of a class whose objects have no ``__dict__``."""
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of an object by name, also of a class with slots."""
    if hasattr(thing, "__dict__"):
        found: dict[str, Any] = vars(thing)
        return found
    return {name: getattr(thing, name) for name in _slots_of(type(thing)) if hasattr(thing, name)}  # type: ignore[arg-type]


def modules_in(tree: Any) -> list[nn.Module]:
    """The modules in nested lists, tuples and dicts."""
    if isinstance(tree, nn.Module):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [module for item in items for module in modules_in(item)]


def replace(
    tree: Any,
    function: Callable[[Tensor], Tensor],
    depth: int = 0,
    *,
    attributes: bool = True,
    anew: bool = False,
) -> Any:
    """``tree`` with ``function`` applied to its tensors; the same object where nothing changed.

    Containers that change are rebuilt with their type, with ``anew=True`` all are; attributes of opaque objects are set
    in place (left alone with ``attributes=False``).
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, CONSTANTS):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [replace(item, function, depth, attributes=attributes, anew=anew) for item in tree]
        if same_objects(items, tree) and not anew:
            return tree
        return rebuild_sequence(type(tree), items)
    if isinstance(tree, dict):
        if not tree and not anew:
            return tree
        values = {
            key: replace(item, function, depth, attributes=attributes, anew=anew)
            for key, item in tree.items()
        }
        if same_objects(values.values(), tree.values()) and not anew:
            return tree
        return rebuild_dict(type(tree), values, tree)
    is_data = dataclasses.is_dataclass(tree)
    limit = DATA_DEPTH if is_data else ATTRIBUTE_DEPTH
    if (attributes or is_data) and depth < limit and is_walkable(tree):
        changed = {}
        for name, item in list(attributes_of(tree).items()):
            new = replace(item, function, depth + 1, attributes=attributes, anew=anew)
            if new is not item:
                changed[name] = new
        if changed and is_data:
            return rebuild_dataclass(type(tree), {**attributes_of(tree), **changed})
        for name, item in changed.items():
            object.__setattr__(tree, name, item)
    return tree


def leaves_in(tree: Any, depth: int = 0) -> list[Any]:
    """The items of containers, in the order in which :func:`replace` comes to them: tensors, constants, other
    objects."""
    is_data = dataclasses.is_dataclass(tree) and depth < DATA_DEPTH and is_walkable(tree)
    if isinstance(tree, (list, tuple)):
        items = tree
    elif isinstance(tree, dict):
        items = [*tree.values()]
    elif is_data:
        items = [*attributes_of(tree).values()]
    else:
        return [tree]
    return [leaf for item in items for leaf in leaves_in(item, depth + is_data)]


def with_things(tree: Any, function: Callable[[Any], Any]) -> Any:
    """``tree`` with what ``function`` gives for it, or else for the things in it; the same where nothing changed."""
    found = function(tree)
    if found is not tree or isinstance(tree, (Tensor, torch.Size, *CONSTANTS)):
        return found
    if isinstance(tree, (list, tuple)):
        items = [with_things(item, function) for item in tree]
        return tree if same_objects(items, tree) else rebuild_sequence(type(tree), items)
    if isinstance(tree, dict):
        values = {key: with_things(item, function) for key, item in tree.items()}
        return (
            tree if same_objects(values.values(), tree.values()) else rebuild_dict(type(tree), values, tree)
        )
    if dataclasses.is_dataclass(tree) and is_walkable(tree):
        before = attributes_of(tree)
        values = {name: with_things(item, function) for name, item in before.items()}
        return (
            tree if same_objects(values.values(), before.values()) else rebuild_dataclass(type(tree), values)
        )
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
    """The tensors that functions in a tree bring along: in closures, in defaults and bound by ``partial``."""
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
    """True if two collections of one length hold the same objects in the same order."""
    return all(map(is_, some, others))


def rebuild_sequence(kind: type, items: list[Any]) -> Any:
    """A list or tuple of that kind with these items: named tuples and ``torch.return_types`` too.

    A named tuple is made without its ``__new__``, which may refuse tensors without data (``PackedSequence``).
    """
    if hasattr(kind, "_fields"):
        return tuple.__new__(kind, items)
    return kind(items)


def rebuild_dict(kind: type, values: dict[Any, Any], like: Any = None) -> Any:
    """A dict of that kind with these values. ``like``: a dict whose further attributes the new one has too."""
    if kind is dict:
        return values
    if dataclasses.is_dataclass(kind):
        return kind(**values)
    new: Any = None
    with suppress(Exception):  # the class's own code
        new = like.copy()
    if type(new) is not kind:
        new = kind()
    for key, item in values.items():
        new[key] = item
    return new


def rebuild_dataclass(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass's object with these attributes, made without its ``__init__``, which may change them."""
    new: Any = object.__new__(kind)
    for name, item in values.items():
        object.__setattr__(new, name, item)
    return new


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


def has_objects(tree: Any) -> bool:
    """True if objects lie in ``tree`` whose attributes may change, such as caches."""
    return any(is_walkable(thing) for thing in opaque_objects(tree))


# --- tensors that are made of others: weights that torchao has quantised, say, of whole numbers and scales ---
# PyTorch's protocol for them is ``__tensor_flatten__``: the names of the tensors inside.


def is_wrapped(tensor: Tensor) -> bool:
    """True if ``tensor`` is made of others; a sharded one (``DTensor``), of which each rank has a part, is not."""
    kinds = type(tensor).__mro__
    return hasattr(tensor, "__tensor_flatten__") and not any(
        each.__module__.startswith("torch.distributed.") for each in kinds
    )


def plain_tensors_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory that ``tensor`` is made of; itself, if it is none of that kind."""
    return (each for _, each in named_plain_tensors(tensor, ""))


def named_plain_tensors(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    """The same with names: that of ``tensor``, and where it is made of others ``name.inner``."""
    if not is_wrapped(tensor):
        yield name, tensor
        return
    for inner in _names_in(tensor):
        yield from named_plain_tensors(getattr(tensor, inner), f"{name}.{inner}")


def bytes_of(tensor: Tensor) -> int:
    """The memory of what ``tensor`` is made of."""
    return sum(each.nbytes for each in plain_tensors_of(tensor))


def replace_inside(tensor: Tensor, replace: Callable[[Tensor], Tensor]) -> None:
    """Let ``tensor``, which is made of others, be made of what ``replace`` gives for each of these."""
    for name in _names_in(tensor):
        inner = getattr(tensor, name)
        if is_wrapped(inner):
            replace_inside(inner, replace)
        else:
            setattr(tensor, name, replace(inner))


def made_like(tensor: Tensor, kind: Any, values: Iterator[Tensor]) -> Tensor:
    """A tensor of the class ``kind`` that is made as ``tensor`` is, of the next of these values."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {}
    for name in names:
        own = getattr(tensor, name)
        inner[name] = made_like(own, type(own), values) if is_wrapped(own) else next(values)
    made: Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def _names_in(tensor: Tensor) -> list[str]:
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return names
