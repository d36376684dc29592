"""Writes of a call into the lists, dicts and objects that it is given: another result of the call.

A module may fill what it gets: a cache with keys and values, say. Only the rank that runs the module would show that.
So this rank looks at what was given before the call and after it. What has changed goes the way of results: the other
ranks get it once for each signature, put placeholders in the same places, and data go where somebody uses them.

    partition 0     layer(x, cache)     cache.keys: a tensor
    partition 1     skips the call      cache.keys: `Left`, a tensor without data

A later call that gets the same cache would get all that is in there. Most use nothing of it, so it is sent only to
modules that have used what others left in the traced microbatch. In other modules a `Left` refuses to be used.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.calls.call_signature import after_writes
from weft.torch.tensors.description import class_name, find_class
from weft.torch.tensors.pytree import (
    ATTRIBUTE_DEPTH,
    CONSTANTS,
    DATA_DEPTH,
    attributes_of,
    is_walkable,
    leaves_in,
    map_nodes,
    rebuild_sequence,
    same_objects,
)

_PLAIN, _TENSOR, _TUPLE, _SEQUENCE, _MAPPING, _SET, _DATA, _OBJECT = range(8)
_CONTAINERS: tuple[tuple[tuple[type, ...], int], ...] = (
    ((tuple,), _TUPLE), ((list, deque), _SEQUENCE), ((dict,), _MAPPING), ((set,), _SET),
)  # fmt: skip
_ABSTRACT = {_SEQUENCE: MutableSequence, _MAPPING: MutableMapping, _SET: MutableSet}
"""What counts for classes that keep what they hold where nobody sees it. Others keep it in their attributes."""
_LIMITS = {_DATA: DATA_DEPTH, _OBJECT: ATTRIBUTE_DEPTH}
_VALUES = (*CONSTANTS, torch.dtype, torch.device, torch.Size)
"""What is the same if it is equal."""
_kinds: dict[type, int] = {}
_FINAL = frozenset((type(None), bool, int, float, str))


@dataclasses.dataclass(frozen=True)
class Kept:
    """An item that the container held before the call, by its place there."""

    place: int


@dataclasses.dataclass(frozen=True)
class Known:
    """A thing that the call was given, by its number, or one that it has made: these go on counting."""

    number: int


@dataclasses.dataclass(frozen=True)
class New:
    """A list, dict, set or object that the call has made: its class, and what it holds, each item with its key.

    ``attributes``: those of a list, dict or set of a class of its own.
    """

    kind: str
    items: list[tuple[Any, Any]]
    attributes: list[tuple[Any, Any]]


Change = tuple[int, list[tuple[Any, Any]]]
"""The number of a thing that the call has changed, and all that it holds now, each item with its key or name."""


class Filled(NamedTuple):
    """The result of a call, and what it has put into the things that it was given.

    ``written``: what it has written into attributes of its own modules, by the names of module and attribute.
    """

    result: Any
    changes: list[Change]
    written: dict[str, Any]

    @property
    def uncertain(self) -> bool:
        """True if numbers or texts were put somewhere, which may be others at each call."""
        return any(_is_uncertain(item) for _, items in self.changes for _, item in items)

    def without_numbers(self) -> Filled:
        """The same without floating-point numbers in attributes, which may be others at each call."""
        return self._replace(
            written={
                key: value
                for key, value in self.written.items()
                if not any(isinstance(leaf, float) for leaf in leaves_in(value, data=False))
            }
        )


def _is_uncertain(item: Any) -> bool:
    if isinstance(item, New):
        return any(_is_uncertain(each) for _, each in (*item.items, *item.attributes))
    if isinstance(item, tuple):
        return any(map(_is_uncertain, item))
    return isinstance(item, (int, float, str)) and not isinstance(item, bool)


def fills(description: list[Any]) -> bool:
    """True if the description of a `Filled` has changes."""
    return bool(description[2][1][2])


def written_by(description: list[Any]) -> list[str]:
    """The names of the attributes that a call with this description writes; see `Filled`."""
    if description[0] != "sequence" or description[1] != class_name(Filled):
        return []
    return [key[1] for key, _ in description[2][2][2]]


def puts_the_same(description: list[Any], other: list[Any]) -> bool:
    """True if the descriptions of two `Filled` have the same changes, in tensors of the same shapes."""
    return _alike(description[2][1], other[2][1])


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        if one[:1] == ["tensor"] == other[:1]:
            return bool(one[1][:2] == other[1][:2])
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    return bool(one == other)


class Contents:
    """The lists, dicts, sets and objects among a call's arguments, and what they hold before the call.

    Attributes:
        things: These, in the same order on every rank.
        tensors: The tensors in them.
        arguments: The call's arguments.
        passed_by: Things that hold values and tensors, and of all of these ``passes_by`` says that the call does not
            use them; with what they hold. They count neither as things nor in the signature.
    """

    def __init__(self, arguments: Sequence[Any], passes_by: Callable[[Tensor], bool] | None = None) -> None:
        self.arguments = arguments
        self.things: list[Any] = []
        self.tensors: list[Tensor] = []
        self.passed_by: list[tuple[Any, dict[Any, Any]]] = []
        self._before: list[dict[Any, Any]] = []
        self._local = self._before
        self._local_beside: list[dict[Any, Any]] = []
        self._made: list[Any] = []
        self._reached = 0
        numbers = self._numbers = dict[int, int]()
        waiting = [(each, 0, False) for each in arguments]
        while waiting:
            thing, depth, inside = waiting.pop()
            kind = _kind_of(thing)
            if kind == _TENSOR:
                self.tensors += [thing] if inside else []
            elif kind == _TUPLE:
                waiting += [(item, depth, inside) for item in thing]
            elif kind != _PLAIN and id(thing) not in numbers and depth < _LIMITS.get(kind, depth + 1):
                held = _held(thing, kind)
                if passes_by is not None and inside and _holds_only(passes_by, thing, kind, held):
                    self.passed_by.append((thing, held))
                    continue
                numbers[id(thing)] = len(numbers)
                self.things.append(thing)
                self._before.append(held)
                depth += kind >= _DATA
                waiting += [(item, depth, True) for item in held.values() if type(item) not in _FINAL]
                own = _attributes(thing, kind)
                if own is not None:
                    waiting.append((own, depth, True))

    def signature(self) -> tuple[Any, ...]:
        """The properties that calls must have in common here so that they return and leave the same shapes."""
        return tuple(map(_signature, self.things, self._before))

    def localise(
        self, transform: Callable[[Tensor], Tensor], beside: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Find what `local` is to show in the place of the tensors. ``beside``: of those that are passed by."""
        self._local = [_with_tensors(held, transform) for held in self._before]
        if beside is not None:
            self._local_beside = [_with_tensors(held, beside) for _, held in self.passed_by]

    def local(self) -> None:
        """From now on the things hold what `localise` has found."""
        for thing, local, before in zip(self.things, self._local, self._before, strict=True):
            if not same_objects(local.values(), before.values()):
                fill(thing, local)
        for (thing, before), local in zip(self.passed_by, self._local_beside, strict=True):
            if not same_objects(local.values(), before.values()):
                fill(thing, local)

    def restore(self) -> None:
        """The things hold again what they held before."""
        for thing, before in (*zip(self.things, self._before, strict=True), *self.passed_by):
            fill(thing, before)

    def changes(self) -> list[Change]:
        """The changes of the containers, after `local` if that was called.

        Raises:
            UsageError: There is something that cannot be sent to other ranks.
        """
        found = []
        for number, (thing, before) in enumerate(zip(self.things, self._local, strict=True)):
            kind = _kind_of(thing)
            now = _held(thing, kind)
            if len(now) == len(before) and all(map(_same, now.values(), before.values())):
                if kind == _SEQUENCE or same_objects(now, before):
                    continue
            places = {id(item): place for place, item in enumerate(before.values())}
            items = [(_key(key), self._described(item, places)) for key, item in now.items()]
            found.append((number, items))
        return found

    def tensors_in(self, number: int) -> list[Tensor]:
        """The tensors that the thing of this number has held before the call, by itself."""
        return [item for item in self._before[number].values() if isinstance(item, Tensor)]

    def beside(self) -> list[Tensor]:
        """The tensors in what is passed by, as `localise` has found them."""
        return [item for held in self._local_beside for item in held.values() if isinstance(item, Tensor)]

    def written_beside(self) -> Any:
        """One of ``passed_by`` that the call has written, if any: it holds something else than before."""
        for (thing, _), held in zip(self.passed_by, self._local_beside, strict=True):
            now = _held(thing, _kind_of(thing))
            if len(now) != len(held) or not all(map(_same, now.values(), held.values())):
                return thing
        return None

    def refer(self, result: Any) -> Any:
        """A result of the call, with references where it is, or holds, one of the things or what `changes` found."""

        def known(item: Any) -> Any:
            number = self._number(item)
            return item if number is None else Known(number)

        return map_nodes(result, known)

    def find(self, result: Any) -> Any:
        """The result that `refer` has given references for, after `apply`."""
        return map_nodes(result, lambda item: self._thing(item.number) if isinstance(item, Known) else item)

    def _number(self, item: Any) -> int | None:
        number = self._numbers.get(id(item))
        return number if number is not None and self._thing(number) is item else None

    def _thing(self, number: int) -> Any:
        given = len(self.things)
        return self.things[number] if number < given else self._made[number - given]

    def _make(self, thing: Any) -> None:
        """Count one more thing that the call has made."""
        self._numbers[id(thing)] = len(self.things) + len(self._made)
        self._made.append(thing)

    def _described(self, item: Any, places: dict[int, int]) -> Any:
        """An item as it is sent to other ranks. ``places``: where the thing held items before, by their ids."""
        if not isinstance(item, CONSTANTS) and id(item) in places:
            return Kept(places[id(item)])
        number = self._number(item)
        if number is not None:
            return Known(number)
        kind = _kind_of(item)
        if kind == _TUPLE:
            return rebuild_sequence(type(item), [self._described(each, {}) for each in item])
        if kind in (_PLAIN, _TENSOR):
            return item  # what cannot be described is refused by who describes it
        if getattr(item, "default_factory", None) is not None or getattr(item, "maxlen", None) is not None:
            raise UsageError(
                f"puts a new {type(item).__qualname__} into a container, and not all of it can be sent to other ranks"
            )
        self._make(item)
        items, own = _held(item, kind), _attributes(item, kind) or {}
        return New(
            class_name(type(item)),
            [(_key(key), self._described(each, {})) for key, each in items.items()],
            [(_key(key), self._described(each, {})) for key, each in own.items()],
        )

    def apply(self, changes: Sequence[Change]) -> None:
        """Let the things hold what a call has put there, as `changes` describes it, in place of what they held before.

        On the rank that made the call new containers and objects stay the ones that it has made.
        """
        self._reached = 0
        for number, items in changes:
            places = [*self._before[number].values()]
            fill(self.things[number], {key: self._found(item, places) for key, item in items})

    def _found(self, item: Any, places: Sequence[Any]) -> Any:
        if isinstance(item, Kept):
            return places[item.place]
        if isinstance(item, Known):
            return self._thing(item.number)
        if isinstance(item, tuple) and not isinstance(item, torch.Size):
            return rebuild_sequence(type(item), [self._found(each, ()) for each in item])
        if not isinstance(item, New):
            return item
        if self._reached == len(self._made):
            self._make(_empty(find_class(item.kind, (object,))))
        thing = self._made[self._reached]
        self._reached += 1
        fill(thing, {key: self._found(each, ()) for key, each in item.items})
        own = _attributes(thing, _kind_of(thing))
        if own is not None:
            fill(own, {key: self._found(each, ()) for key, each in item.attributes})
        return thing


def outside(tree: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """``tree`` with its tensors changed, but for those in lists, dicts and objects."""
    return map_nodes(tree, lambda item: transform(item) if isinstance(item, Tensor) else item, (tuple,))


def _kind_of(thing: Any) -> int:
    kind = _kinds.get(type(thing))
    if kind is None:
        kind = _kinds[type(thing)] = _find_kind(thing)
    return kind


def _find_kind(thing: Any) -> int:
    if isinstance(thing, Tensor):
        return _TENSOR
    if isinstance(thing, _VALUES):
        return _PLAIN
    for bases, kind in _CONTAINERS:
        if isinstance(thing, bases):
            return kind
    if not is_walkable(thing):
        return next((kind for kind, base in _ABSTRACT.items() if isinstance(thing, base)), _PLAIN)
    return _DATA if dataclasses.is_dataclass(thing) else _OBJECT


def _held(thing: Any, kind: int) -> dict[Any, Any]:
    """The items of a container, by index, key or name; of a set the elements are the keys."""
    if kind == _SEQUENCE:
        return dict(enumerate(thing))
    if kind == _SET:
        return dict.fromkeys(thing)
    return dict(thing if kind == _MAPPING else attributes_of(thing))


def _attributes(thing: Any, kind: int) -> dict[Any, Any] | None:
    """The attributes of a list, dict or set of a class of its own: one more thing, which may be filled."""
    return getattr(thing, "__dict__", None) if kind in _ABSTRACT else None


def _with_tensors(held: dict[Any, Any], transform: Callable[[Tensor], Tensor]) -> dict[Any, Any]:
    """The contents of a thing, with its tensors changed."""
    changed = held.copy()
    for key, item in held.items():
        kind = _kind_of(item)
        if kind == _TENSOR:
            changed[key] = transform(item)
        elif kind == _TUPLE:
            changed[key] = outside(item, transform)
    return changed


def _holds_only(passes_by: Callable[[Tensor], bool], thing: Any, kind: int, held: dict[Any, Any]) -> bool:
    """True if a thing holds tensors for which ``passes_by`` is true, and values, and nothing else."""
    found = False
    for item in held.values():
        what = _kind_of(item)
        if what == _TENSOR and passes_by(item):
            found = True
        elif what != _PLAIN:
            return False
    return found and _attributes(thing, kind) is None


def _signature(thing: Any, held: dict[Any, Any]) -> tuple[Any, ...]:
    if _kind_of(thing) == _SET:
        return type(thing), len(held)
    keys = tuple(key if isinstance(key, CONSTANTS) else type(key) for key in held)
    return type(thing), keys, tuple(map(_seen, held.values()))


def _seen(item: Any) -> Any:
    """The part of an item that belongs into a signature. Numbers and texts in objects may be each rank's own, so
    they do not count."""
    kind = _kind_of(item)
    if kind == _TENSOR:
        item = after_writes(item)
        return item.shape, item.dtype
    if kind == _TUPLE:
        return tuple(map(_seen, item))
    return item if item is None or isinstance(item, bool) else type(item)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and one == other)


def _key(key: Any) -> Any:
    if not isinstance(key, (*CONSTANTS, tuple)):
        raise UsageError(
            f"puts a {type(key).__qualname__} as a key into a container, which cannot be sent to other ranks"
        )
    return key


def _empty(kind: Any) -> Any:
    own = issubclass(kind, (list, deque, dict, set))
    return kind.__new__(kind) if own else object.__new__(kind)


def fill(thing: Any, items: dict[Any, Any]) -> None:
    """Let a thing hold these items and no others, in this order, past what its class makes of that."""
    kind = _kind_of(thing)
    now = _held(thing, kind)
    if len(now) == len(items) and all(map(is_, now.values(), items.values())) and [*now] == [*items]:
        return
    built_in = (list, deque, OrderedDict, dict, set)
    own: Any = next((base for base in built_in if isinstance(thing, base)), type(thing))
    if kind == _SEQUENCE:
        own.clear(thing)
        own.extend(thing, items.values())
    elif kind == _SET:
        own.clear(thing)
        for item in items:
            own.add(thing, item)
    elif kind == _MAPPING:
        _fill_by_key(thing, now, items, own.__delitem__, own.__setitem__)
    else:
        _fill_by_key(thing, now, items, object.__delattr__, object.__setattr__)


def _fill_by_key(
    thing: Any,
    now: dict[Any, Any],
    items: dict[Any, Any],
    delete: Callable[..., None],
    put: Callable[..., None],
) -> None:
    stays = [key for key in now if key in items]
    in_order = stays == [*items][: len(stays)]
    for key in now:
        if not in_order or key not in items:
            delete(thing, key)
    for key, item in items.items():
        if not in_order or key not in now or now[key] is not item:
            put(thing, key, item)


__all__ = ["Change", "Contents", "Filled", "fill", "fills", "outside", "puts_the_same", "written_by"]
