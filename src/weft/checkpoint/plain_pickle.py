"""Pickles that hold plain values and a few named records, read without unpickling.

What a pickle names is never imported, called or written into: a class becomes a :class:`Name`, an object of it a
:class:`Record` with what the file says of it. So a file can neither run code nor change a class, and what it can cost
is in proportion to its size. Whatever is not needed for that is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

_MOST_BYTES_OF_A_NUMBER = 16


class Name:
    """A class or function that a pickle names. ``made``: turns its arguments into what stands for the object."""

    def __init__(self, text: str, made: Callable[..., Any] | None) -> None:
        self.text = text
        self.made = made

    def __call__(self, *arguments: Any) -> Any:
        return Record(self.text, arguments) if self.made is None else self.made(*arguments)


class Record:
    """An object of a class that a pickle names: the arguments of its making, and its state."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def get(self, field: str, kind: type) -> Any:
        """The attribute of a name; :class:`ValueError` if it is not of that kind."""
        value = self.state.get(field) if isinstance(self.state, dict) else None
        if not isinstance(value, kind):
            raise ValueError(f"{field} of a {self.name} is a {type(value).__name__}, not a {kind.__name__}")
        return value


Known = Callable[[str, str], Any]
"""Given module and name: a :class:`Name`, or a value; it raises :class:`ValueError` for what does not belong there."""


def read_pickle(content: bytes, known: Known) -> Any:
    """The value of a pickle; :class:`ValueError` if it holds what ``known`` does not know, or is damaged.

    >>> import fractions, pickle
    >>> written = pickle.dumps([fractions.Fraction(1, 2), {"a": (True, None)}])
    >>> record, rest = read_pickle(written, lambda module, name: Name(name, None))
    >>> record.name, record.arguments, rest
    ('Fraction', (1, 2), {'a': (True, None)})
    """
    machine = _Machine(known)
    for operation, argument, _ in pickletools.genops(content):
        act = _ACTIONS.get(operation.name)
        if act is None:
            raise ValueError(f"{operation.name} does not belong there")
        act(machine, argument)
    (value,) = machine.stack
    return value


class _Machine:
    def __init__(self, known: Known) -> None:
        self.known = known
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def number(self, value: int) -> None:
        if value.bit_length() > 8 * _MOST_BYTES_OF_A_NUMBER:
            raise ValueError(f"a number of {value.bit_length()} bits does not belong there")
        self.push(value)

    def take(self, count: int) -> list[Any]:
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise ValueError("it takes more than there is")
        taken = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return taken

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def put(self, key: int | None) -> None:
        self.memo[len(self.memo) if key is None else key] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        self.push(tuple(self.take(count)))

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise ValueError(f"a {type(target).__name__} is no list")
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError(f"a {type(target).__name__} is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int, Record)):  # a key of nested tuples may take for ever to hash
                raise ValueError(f"a {type(key).__name__} is no key")
            target[key] = value

    def name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name is no text")
        self.push(self.known(module, name))

    def call(self) -> None:
        function, arguments = self.take(2)
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError(f"a {type(function).__name__} cannot be called")
        self.push(function(*arguments))

    def build(self) -> None:
        (state,) = self.take(1)
        target = self.stack[-1]
        if not isinstance(target, Record) or target.state is not None:
            raise ValueError(f"a {type(target).__name__} has no state to set")
        target.state = state


def _constants(*names: str) -> Mapping[str, Callable[[_Machine, Any], None]]:
    return dict.fromkeys(names, _Machine.push)


_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    **_constants("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINFLOAT"),
    **_constants("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BININT", "BININT1", "BININT2"),
    **dict.fromkeys(("LONG1", "LONG4"), _Machine.number),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, key: machine.push(machine.memo[key])),
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "MARK": lambda machine, argument: machine.marks.append(len(machine.stack)),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "TUPLE1": lambda machine, argument: machine.tuple_of(1),
    "TUPLE2": lambda machine, argument: machine.tuple_of(2),
    "TUPLE3": lambda machine, argument: machine.tuple_of(3),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.since_mark())),
    "APPEND": lambda machine, argument: machine.append(machine.take(1)),
    "APPENDS": lambda machine, argument: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, argument: machine.set_items(machine.take(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.since_mark()),
    "GLOBAL": lambda machine, text: machine.name(*text.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, argument: machine.name(*machine.take(2)),
    "REDUCE": lambda machine, argument: machine.call(),
    "NEWOBJ": lambda machine, argument: machine.call(),
    "BUILD": lambda machine, argument: machine.build(),
}
"""What each operation does; those that are not here are refused."""
