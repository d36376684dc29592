"""Python values as JSON with tensors beside it, and back. Reading runs no code that a text brings along.

    {"x": tensor, "k": (1, 2)}  ->  {"x": {"$tensor": "user/0"}, "k": {"$tuple": [1, 2]}}, and the tensor

Numbers, texts, None, lists, and dicts whose keys are texts without ``$`` are JSON. Everything else is an object with
one member, whose name is a tag:

    $tensor      where the tensor lies            $tuple, $set       list
    $numpy       [where, dtype, shape]            $dict              [[key, value], ...]
    $scalar      the same, of a NumPy scalar      $namespace         object
    $bytes       base64, or where they lie        $dtype, $device    text
    $int         hexadecimal, from 64 bits on     $float             "nan", "inf", "-inf"
    $pickle      as $bytes, only where the caller allows pickle
    in messages only:  $frozenset, $size  list      $ordered  as $dict     $complex  text
                       $bytearray  as $bytes        $dataclass  [module, name, {field: value}]

A tag that has been in a file keeps its meaning for ever. `Rules` says what differs: those of files are in
``saved_values``, those of messages in ``messages``.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import math
import pickle
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.errors import WeftError
from weft.transport.tensor_bytes import to_bytes
from weft.untrusted import LARGEST, shown, shown_text, translated

MAX_DEPTH = 100
NUMBERS = re.compile(r"[<>|=]?[biufc]\d{1,9}")
"""The dtypes of NumPy arrays that hold numbers and nothing else."""


@dataclass(frozen=True)
class Rules:
    """The values that files or messages take, and the error for the rest."""

    name: str  # what is read, for messages
    tags: frozenset[str]
    written_as: Mapping[str, str]  # tags that others stand for
    exact: bool  # whether an object of a derived class is refused, rather than written as its base
    inline_bytes: bool  # whether bytes are written in base64, rather than as a tensor
    arrays: re.Pattern[str]  # the dtypes of NumPy arrays
    takes: Callable[[Tensor], bool]  # whether a tensor is written as such
    fault: Callable[[Any], str]  # why a value is refused
    remedy: str  # what to do about values that are refused
    refusal: type[WeftError]  # the error for values that are refused
    damage: type[WeftError]  # the error for JSON that weft did not write
    cause: str = ""  # where such JSON comes from


class Encoder:
    """Turns values into JSON.

    Args:
        rules: Those of files, or of messages.
        put: Takes a tensor and its path in the value, and gives the JSON by which the tensor is found again.
        allow_pickle: Whether an object of another type is pickled rather than refused.
    """

    def __init__(self, rules: Rules, put: Callable[[Tensor, str], Any], allow_pickle: bool) -> None:
        self.rules = rules
        self.put = put
        self.allow_pickle = allow_pickle
        self.pickled: list[str] = []  # the paths of what was pickled
        self._faults: list[str] = []
        self._above: set[int] = set()

    def encode(self, value: Any, what: str) -> Any:
        """``value`` as JSON; ``what`` names the value in the error, which lists everything that is refused."""
        self._faults = []
        result = self.write(value, what, 0)
        if self._faults:
            raise self.rules.refusal(f"{'; '.join(self._faults)}: {self.rules.remedy}")
        return result

    def write(self, value: Any, path: str, depth: int) -> Any:
        """JSON for a part of the value; ``depth`` counts the levels above the part."""
        if _is_plain(value):
            return value
        if id(value) in self._above:
            raise self.rules.refusal(f"{path} contains itself: only values without cycles can be written")
        if depth > MAX_DEPTH:
            raise self.rules.refusal(f"{path} lies deeper than {MAX_DEPTH} levels: flatten the object")
        self._above.add(id(value))
        try:
            if type(value) is list:
                return self.items(value, path, depth)
            tag = self._tag(value)
            if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.write(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
            if tag:
                return {tag: FORMS[tag].write(self, value, path, depth)}
            return self._other(value, path)
        finally:
            self._above.discard(id(value))

    def items(self, values: Iterable[Any], path: str, depth: int) -> list[Any]:
        """JSON for each item of a list."""
        return [
            item if _is_plain(item) else self.write(item, f"{path}[{number}]", depth + 1)
            for number, item in enumerate(values)
        ]

    def pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        """[key, value] for each item of a mapping."""
        return [
            [
                self.write(key, f"a key of {path}", depth + 1),
                self.write(item, f"{path}[{str(key)[:40]!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]

    def put_bytes(self, content: bytes | bytearray, path: str) -> Any:
        """JSON by which bytes are found again."""
        return base64.b64encode(content).decode() if self.rules.inline_bytes else self.put_raw(content, path)

    def put_raw(self, content: bytes | bytearray, path: str) -> Any:
        """JSON by which bytes are found again, which go where tensors go."""
        raw = bytearray(content)
        return self.put(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0).byte(), path)

    def _tag(self, value: Any) -> str:
        """The tag that a value is written with; empty for what is refused or pickled."""
        rules = self.rules
        found = _tag_of(value, rules.exact)
        tag = rules.written_as.get(found, found)
        if tag not in rules.tags or (tag == "$tensor" and not rules.takes(value)):
            return ""
        if tag in ("$numpy", "$scalar") and rules.arrays.fullmatch(value.dtype.str) is None:
            return ""
        return tag

    def _other(self, value: Any, path: str) -> Any:
        if not self.allow_pickle:
            self._faults.append(f"{path} {self.rules.fault(value)}")
            return None
        fault = f"{path} is of type {type(value).__qualname__}, which pickle refuses"
        with translated(fault, self.rules.refusal):
            content = pickle.dumps(value)
        self.pickled.append(path)
        return {"$pickle": self.put_bytes(content, path)}


class Unread:
    """Stands for a pickled object that was not read."""

    def __repr__(self) -> str:
        return "<a pickled object that was not read>"


class Decoder:
    """The way back.

    Args:
        rules: Those of files, or of messages.
        take: Gives the tensor that is found by the JSON which ``put`` gave. Nothing that it is asked for is believed.
        allow_pickle: Whether pickled objects may run their code; "leave" puts an `Unread` in their place.
    """

    def __init__(self, rules: Rules, take: Callable[[Any], Tensor], allow_pickle: bool | str) -> None:
        self.rules = rules
        self.take = take
        self.allow_pickle = allow_pickle

    def decode(self, content: Any) -> Any:
        """The value that `Encoder` was given; an error of weft's for JSON that it did not write."""
        return self.read(content, 0)

    def read(self, content: Any, depth: int) -> Any:
        """A part of the value; ``depth`` counts the levels above the part."""
        name, damage = self.rules.name, self.rules.damage
        if depth > MAX_DEPTH:
            raise damage(f"a value of {name} is more than {MAX_DEPTH} levels deep: do not use it")
        if isinstance(content, list):
            return self.items(content, depth)
        if not isinstance(content, dict):
            return content
        tag = next(iter(content), "")
        if len(content) != 1 or not tag.startswith("$"):
            return {key: self.read(item, depth + 1) for key, item in content.items()}
        if tag not in self.rules.tags:
            raise damage(f"{shown_text(tag)} of {name} is unknown to this version of weft")
        with translated(f"{tag} of {name} cannot be read", damage, self.rules.cause):
            return FORMS[tag].read(self, content[tag], depth)

    def items(self, contents: Iterable[Any], depth: int) -> list[Any]:
        """The items of a list."""
        return [self.read(item, depth + 1) if isinstance(item, (list, dict)) else item for item in contents]

    def pairs(self, contents: Any, depth: int) -> list[tuple[Any, Any]]:
        """The items of a mapping."""
        return [(self.read(key, depth + 1), self.read(item, depth + 1)) for key, item in contents]

    def take_bytes(self, content: Any) -> bytes:
        """The bytes that ``put_bytes`` was given."""
        if isinstance(content, str):
            return base64.b64decode(content, validate=True)
        return to_bytes(self.take(content))

    def unpickle(self, content: Any) -> Any:
        """A pickled object, if the caller allows that."""
        if self.allow_pickle == "leave":
            return Unread()
        if not self.allow_pickle:
            raise self.rules.damage(
                f"{self.rules.name} holds a pickled object, which may run any code when it is read: pass "
                "allow_pickle=True if you trust whoever wrote it"
            )
        return pickle.loads(self.take_bytes(content))


class Form(NamedTuple):
    """The way in which values of one tag are written and read: a row of `FORMS`."""

    write: Callable[[Encoder, Any, str, int], Any]
    read: Callable[[Decoder, Any, int], Any]


def named_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``float32``; `ValueError` for other names.

    >>> named_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{shown(name)} is no dtype of this version of torch")
    return found


def type_name(value: Any) -> str:
    """The full name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_plain(value: Any) -> bool:
    """True if JSON holds a value as it is. Of a longer number, Python may refuse to read the digits."""
    kind = type(value)
    return (
        value is None
        or kind in (bool, str)
        or (kind is int and value.bit_length() < 64)
        or (kind is float and math.isfinite(value))
    )


_TAGS: dict[type, str] = {
    int: "$int", float: "$float", complex: "$complex", bytes: "$bytes", bytearray: "$bytearray",
    tuple: "$tuple", set: "$set", frozenset: "$frozenset", torch.Size: "$size",
    dict: "$dict", OrderedDict: "$ordered", defaultdict: "$default", argparse.Namespace: "$namespace",
    torch.dtype: "$dtype", torch.device: "$device",
}  # fmt: skip
"""``$default`` is in no row of `FORMS`: files write a ``defaultdict`` as a dict, messages refuse it."""


def _tag_of(value: Any, exact: bool) -> str:
    """The tag of a value by its type; empty for types without one."""
    if isinstance(value, Tensor):
        return "$tensor"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return "$scalar"
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "" if exact and type(value) is not numpy.ndarray else "$numpy"
    if _is_fillable(type(value)):
        return "$dataclass"
    bases = () if exact else (bytes, bytearray, argparse.Namespace)
    base = next((base for base in bases if isinstance(value, base)), None)
    return _TAGS.get(base or type(value), "")


def _is_fillable(kind: type) -> bool:
    """True if a class is a dataclass that others can find by its name and that is nothing else besides."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and "<locals>" not in kind.__qualname__
    )


def _write_array(encoder: Encoder, value: Any, path: str, depth: int) -> list[Any]:
    import numpy

    where = encoder.put_raw(numpy.ascontiguousarray(value).tobytes(), path)
    return [where, value.dtype.str, list(value.shape)]


def _read_array(decoder: Decoder, content: Any, depth: int) -> Any:
    import numpy

    where, name, shape = content
    if not isinstance(name, str) or decoder.rules.arrays.fullmatch(name) is None:
        raise ValueError(f"{shown(name)} is no dtype of numbers")
    if not all(type(dim) is int and 0 <= dim <= LARGEST for dim in shape):
        raise ValueError("its shape cannot be")
    dtype = numpy.dtype(name)
    if not dtype.itemsize:  # empty texts: their bytes do not say how many there are
        return numpy.zeros(shape, dtype)
    raw, size = to_bytes(decoder.take(where)), math.prod(shape) * dtype.itemsize
    if size and len(raw) != size:
        raise ValueError(f"it has {len(raw)} bytes in the place of {size}")
    return numpy.frombuffer(bytearray(raw[:size]), dtype).reshape(shape)  # earlier versions: a byte for none


def _write_dataclass(encoder: Encoder, value: Any, path: str, depth: int) -> list[Any]:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    fields = {name: encoder.write(getattr(value, name), f"{path}.{name}", depth + 1) for name in names}
    return [type(value).__module__, type(value).__qualname__, fields]


def _read_dataclass(decoder: Decoder, content: Any, depth: int) -> Any:
    """The object, filled in without its ``__init__``; nothing is imported for it."""
    module, name, saved = content
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and _is_fillable(found)):
        raise decoder.rules.damage(
            f"{decoder.rules.name} holds the dataclass {module}.{name}, which this rank does not know: import {module} "
            "on every rank before the call"
        )
    fields = {key: decoder.read(item, depth + 1) for key, item in saved.items()}
    unknown = set(fields) - {field.name for field in dataclasses.fields(found)}
    if unknown:
        raise decoder.rules.damage(
            f"{decoder.rules.name} holds a {module}.{name} with the fields {', '.join(sorted(unknown))}, which it does "
            "not have on this rank: run the same program everywhere"
        )
    result: Any = object.__new__(found)
    for key, item in fields.items():
        object.__setattr__(result, key, item)
    return result


def _as_text(write: Callable[[Any], str], read: Callable[[str], Any]) -> Form:
    return Form(
        lambda encoder, value, path, depth: write(value), lambda decoder, content, depth: read(content)
    )


def _as_items(make: Callable[[list[Any]], Any]) -> Form:
    return Form(Encoder.items, lambda decoder, content, depth: make(decoder.items(content, depth)))


def _as_pairs(make: Callable[[list[tuple[Any, Any]]], Any]) -> Form:
    return Form(Encoder.pairs, lambda decoder, content, depth: make(decoder.pairs(content, depth)))


def _as_bytes(make: Callable[[bytes], Any]) -> Form:
    return Form(
        lambda encoder, value, path, depth: encoder.put_bytes(value, path),
        lambda decoder, content, depth: make(decoder.take_bytes(content)),
    )


FORMS: dict[str, Form] = {
    "$int": _as_text(hex, lambda text: int(text, 16)),
    "$float": _as_text(repr, float),
    "$complex": _as_text(repr, complex),
    "$dtype": _as_text(lambda dtype: str(dtype)[6:], named_dtype),
    "$device": _as_text(str, torch.device),
    "$bytes": _as_bytes(bytes),
    "$bytearray": _as_bytes(bytearray),
    "$tuple": _as_items(tuple),
    "$set": _as_items(set),
    "$frozenset": _as_items(frozenset),
    "$size": _as_items(torch.Size),
    "$dict": _as_pairs(dict),
    "$ordered": _as_pairs(OrderedDict),
    "$namespace": Form(
        lambda encoder, value, path, depth: encoder.write(vars(value), path, depth + 1),
        lambda decoder, content, depth: argparse.Namespace(**decoder.read(content, depth + 1)),
    ),
    "$tensor": Form(
        lambda encoder, value, path, depth: encoder.put(value, path),
        lambda decoder, content, depth: decoder.take(content),
    ),
    "$numpy": Form(_write_array, _read_array),
    "$scalar": Form(_write_array, lambda decoder, content, depth: _read_array(decoder, content, depth)[()]),
    "$dataclass": Form(_write_dataclass, _read_dataclass),
    "$pickle": Form(
        lambda encoder, value, path, depth: encoder.put_bytes(value, path),
        lambda decoder, content, depth: decoder.unpickle(content),
    ),
}
