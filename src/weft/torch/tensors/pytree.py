"""Pytrees: nested containers whose leaves are tensors, constants and opaque objects.

Containers are lists, tuples (named ones too), dicts and their subclasses, and dataclasses. Any other object is a leaf;
tensors in its attributes are found, and set in place, where a caller asks for that.

Walkers that are not here, and why:

* ``call_signature.scan``, ``Glue._find``, ``localise_slices``: run for each operation, and slices are containers.
* ``shards_in``, ``sequence_in``: the order in which they come to tensors decides, and so does the exact kind of list.
* ``description``, ``communication.serialise``: a tree becomes JSON, and what comes back is not trusted.
* ``container_writes``, ``trace.kept_state``: a graph of objects, with circles, that is noted and restored in place.
* ``torch_file``, `captured_in`: each thing once, without recursion; the file is untrusted.
* ``weft.tensorflow``: the order is that of ``tf.nest``, which sorts keys.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from abc import ABC
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_EMPTY = CellType()
CONSTANTS = (type(None), bool, int, float, str)
"""Types of values that hold no tensors and do not change."""
_ATOMS = (Tensor, *CONSTANTS)
ATTRIBUTE_DEPTH = 3
"""So many opaque objects may lie in each other; tensors in deeper ones are not looked for."""
DATA_DEPTH = 16
"""So many dataclasses may lie in each other; deeper ones may form a circle."""


class Data(ABC):  # noqa: B024 - nothing derives from it
    """The class of all dataclasses' objects, for ``isinstance``; modules and tensors are none."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return dataclasses.is_dataclass(kind) and not issubclass(kind, (Tensor, nn.Module))


BUILT_IN = (list, tuple, dict)
CONTAINERS = (*BUILT_IN, Data)


def items_of(tree: Any, kinds: tuple[Any, ...] = CONTAINERS) -> Mapping[Any, Any] | None:
    """The items of a container by index, key or name; None for what is of none of these kinds.

    >>> items_of(["a", "b"]), items_of({"x": 1}), items_of("text")
    ({0: 'a', 1: 'b'}, {'x': 1}, None)
    """
    if not isinstance(tree, kinds):
        return None
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, Data):
        return attributes_of(tree)
    if isinstance(tree, Mapping):
        return tree.data if isinstance(tree, UserDict) else tree
    return dict(enumerate(tree))


def rebuilt(tree: Any, items: list[Any]) -> Any:
    """A container as ``tree``, with these items in place of its own.

    >>> rebuilt({"x": 1, "y": 2}, ["a", "b"])
    {'x': 'a', 'y': 'b'}
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind(items)
    if isinstance(tree, (list, tuple)):
        return rebuild_sequence(kind, items)
    if isinstance(tree, dict):
        return rebuild_dict(kind, dict(zip(tree, items, strict=True)), tree)
    if isinstance(tree, Data):
        return rebuild_dataclass(kind, dict(zip(attributes_of(tree), items, strict=True)))
    if not isinstance(tree, UserDict):
        return kind(items)
    new = copy.copy(tree)
    new.data = rebuilt(tree.data, items)
    return new


def map_tensors(
    tree: Any, function: Callable[[Tensor], Any], attributes: bool = False, anew: bool = False, depth: int = 0
) -> Any:
    """``tree`` with ``function`` applied to its tensors; the same object where nothing changed.

    ``anew``: lists, tuples and dicts are rebuilt even so. ``attributes``: those of opaque objects are set in place.
    ``depth``: how many objects the tree lies in.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, BUILT_IN):
        items = tree.values() if isinstance(tree, dict) else tree
        after = [map_tensors(item, function, attributes, anew, depth) for item in items]
        return tree if all(map(is_, after, items)) and not anew else rebuilt(tree, after)
    if isinstance(tree, CONSTANTS) or not _opens(tree, depth, attributes):
        return tree
    before = attributes_of(tree).copy()
    after = [map_tensors(item, function, attributes, anew, depth + 1) for item in before.values()]
    if isinstance(tree, Data):
        same = same_objects(after, before.values())
        return tree if same else rebuild_dataclass(type(tree), dict(zip(before, after, strict=True)))
    for (name, item), new in zip(before.items(), after, strict=True):
        if new is not item:
            object.__setattr__(tree, name, new)
    return tree


def map_arguments(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with their tensors changed. Plain lists, tuples and dicts are copied also where nothing changes, for
    what a module writes into them is sharded and must not reach its caller; all other kinds stay the same objects."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)(map_arguments(item, function) for item in tree)
    if type(tree) is dict:
        return {key: map_arguments(item, function) for key, item in tree.items()}
    return tree


def leaves_in(tree: Any, data: bool = True, attributes: bool = False) -> list[Any]:
    """The tensors, constants and opaque objects in a tree, in the order in which :func:`map_tensors` comes to them.

    ``data``: whether dataclasses are containers. ``attributes``: those of opaque objects take the objects' place.
    """
    found: list[Any] = []
    _collect((tree,), found, data, attributes, 0)
    return found


# Not a function inside of the other: that would be a cycle, which keeps the tensors until it is collected.
def _collect(items: Iterable[Any], found: list[Any], data: bool, attributes: bool, depth: int) -> None:
    for item in items:
        if isinstance(item, BUILT_IN):
            _collect(item.values() if isinstance(item, dict) else item, found, data, attributes, depth)
        elif isinstance(item, _ATOMS) or not (data and _opens(item, depth, attributes)):
            found.append(item)
        else:
            _collect(attributes_of(item).values(), found, data, attributes, depth + 1)


def tensors_in(tree: Any, attributes: bool = False) -> list[Tensor]:
    """The tensors in a tree; with ``attributes`` those in opaque objects, too."""
    return [leaf for leaf in leaves_in(tree, attributes=attributes) if isinstance(leaf, Tensor)]


def _opens(thing: Any, depth: int, attributes: bool) -> bool:
    """True if the attributes of an object, which lies in ``depth`` others, are walked."""
    if isinstance(thing, Data):
        return depth < DATA_DEPTH
    return attributes and depth < ATTRIBUTE_DEPTH and is_walkable(thing)


def map_nodes(tree: Any, function: Callable[[Any], Any], kinds: tuple[Any, ...] = CONTAINERS) -> Any:
    """``tree`` with what ``function`` gives for it, or else for the items in it; the same where nothing changed."""
    found = function(tree)
    if found is not tree or isinstance(tree, _ATOMS):
        return found
    items = items_of(tree, kinds)
    if items is None:
        return tree
    after = [map_nodes(item, function, kinds) for item in items.values()]
    return tree if same_objects(after, items.values()) else rebuilt(tree, after)


def nodes_with_paths(
    tree: Any, path: str, kinds: tuple[Any, ...] = BUILT_IN, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Containers and leaves, each with its path, from outside to inside.

    >>> [*nodes_with_paths({"x": [1]}, "batch")]
    [('batch', {'x': [1]}), ("batch['x']", [1]), ("batch['x'][0]", 1)]
    """
    yield path, tree
    items = items_of(tree, kinds)
    if items is None or (is_leaf is not None and is_leaf(tree)):
        return
    by_name = isinstance(tree, Data) and not isinstance(tree, dict)
    for key, item in items.items():
        place = f"{path}.{key}" if by_name else f"{path}[{key!r}]"
        yield from nodes_with_paths(item, place, kinds, is_leaf)


def opaque_objects(tree: Any) -> list[Any]:
    """Objects in ``tree`` that are neither tensors, constants, lists, tuples nor dicts, in a fixed order."""
    return [leaf for leaf in leaves_in(tree, data=False) if not isinstance(leaf, _ATOMS)]


def has_objects(tree: Any) -> bool:
    """True if objects lie in ``tree`` whose attributes may change, such as caches."""
    return any(is_walkable(thing) for thing in opaque_objects(tree))


def modules_in(tree: Any) -> list[nn.Module]:
    """The modules in nested lists, tuples and dicts."""
    return [leaf for leaf in leaves_in(tree, data=False) if isinstance(leaf, nn.Module)]


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
