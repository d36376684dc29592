"""Python objects as text and plain bytes, so that they travel between ranks without pickle.

    {"loss": 0.5, "x": tensor}  ->  text   {"loss": 0.5, "x": {"!": "tensor", "at": 0, "dtype": "float32", ...}}
                                    blobs  [the tensor's bytes]

JSON's own values stand for themselves; everything else is an object with the key ``!``. Reading such a text runs no
code of anybody: a dataclass is filled in without its ``__init__``, and only if this process has its module already.
Values that fit none of this travel only where both sides allow pickle.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import TransportError
from weft.foreign import shown, translated
from weft.transport.torch_dist import DTYPES, to_bytes

MOST_DEPTH = 100
MARK = "!"
_WHOLE = 1 << 53
_ARRAY = re.compile(r"[<>|][biufcSU]\d{1,9}|[<>][mM]8\[\w{1,8}\]")
_DTYPES = {str(dtype)[6:]: dtype for dtype in DTYPES}
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}

REMEDY = (
    "JSON's values, tuples, sets, bytes, tensors, NumPy arrays and dataclasses travel; turn it into one of them, or "
    "give allow_pickle=True on both sides if every rank is to be trusted"
)


@dataclasses.dataclass
class Packed:
    """An object ready to travel. ``pickled``: paths of what had to be pickled."""

    text: str
    blobs: list[Tensor]
    pickled: list[str]

    @property
    def sizes(self) -> list[int]:
        return [blob.numel() for blob in self.blobs]


def pack(
    value: Any, allow_pickle: bool = False, is_remote: Callable[[Tensor], bool] = lambda tensor: False
) -> Packed:
    """``value`` as text and blobs (uint8 tensors on the CPU, one dim).

    ``is_remote`` says of which tensors this rank has no data. Tensors arrive without their graph.
    Raises :class:`TransportError` that names the path and type of what cannot travel.
    """
    packer = _Packer(allow_pickle, is_remote)
    content = packer.write(value, "the object", 0)
    return Packed(json.dumps(content), packer.blobs, packer.pickled)


def unpack(text: str, blobs: Sequence[Tensor], device: torch.device, allow_pickle: bool = False) -> Any:
    """What :func:`pack` was given. Tensors that were on a GPU come to ``device``, the others to the CPU."""
    remedy = "do all ranks run the same version of weft?"
    with translated("what arrived cannot be read as an object", TransportError, remedy):
        return _Unpacker(blobs, device, allow_pickle).read(json.loads(text), 0)


class _Packer:
    def __init__(self, allow_pickle: bool, is_remote: Callable[[Tensor], bool]) -> None:
        self.blobs: list[Tensor] = []
        self.pickled: list[str] = []
        self._allow_pickle = allow_pickle
        self._is_remote = is_remote
        self._above: set[int] = set()

    def write(self, value: Any, path: str, depth: int) -> Any:
        """What stands for ``value`` in the text."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and abs(value) < _WHOLE):
            return value
        if kind is int:
            return {MARK: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {MARK: "float", "text": repr(value)}
        if kind is complex:
            return {MARK: "complex", "text": repr(value)}
        if kind in (bytes, bytearray):
            return {MARK: kind.__name__, "at": self._blob(bytearray(value))}
        if isinstance(value, (torch.dtype, torch.device)):
            return {MARK: kind.__name__, "text": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._array(value, path)
        return self._nested(value, path, depth)

    def _nested(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if id(value) in self._above:
            raise TransportError(f"{path} contains itself: only objects without cycles travel between ranks")
        if depth >= MOST_DEPTH:
            raise TransportError(f"{path} lies deeper than {MOST_DEPTH} levels: flatten the object")
        self._above.add(id(value))
        try:
            if kind is list:
                return [self.write(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
            for name, known in _SEQUENCES.items():
                if kind is known:
                    items = [self.write(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
                    return {MARK: name, "items": items}
            if kind in (dict, OrderedDict):
                return self._mapping(value, path, depth)
            if _fillable(kind):
                fields = {
                    field.name: self.write(getattr(value, field.name), f"{path}.{field.name}", depth + 1)
                    for field in dataclasses.fields(value)
                    if hasattr(value, field.name)
                }
                return {
                    MARK: "dataclass",
                    "module": kind.__module__,
                    "name": kind.__qualname__,
                    "fields": fields,
                }
            return self._pickle(value, path)
        finally:
            self._above.discard(id(value))

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if type(value) is dict and MARK not in value and all(type(key) is str for key in value):
            return {key: self.write(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [
                self.write(key, f"a key of {path}", depth + 1),
                self.write(item, f"{path}[{str(key)[:40]!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {MARK: "dict" if type(value) is dict else "OrderedDict", "pairs": pairs}

    def _tensor(self, value: Tensor, path: str) -> Any:
        name = str(value.dtype)[6:]
        elsewhere = value.device.type == "meta" or self._is_remote(value)
        if elsewhere:
            raise TransportError(
                f"{path} is a tensor without data on this rank: send it from the rank that owns it, or return it from "
                "the step"
            )
        if type(value) not in _TENSORS or value.layout != torch.strided or name not in _DTYPES:
            if self._allow_pickle:
                return self._pickle(value, path)
            raise TransportError(
                f"{path} is a {type(value).__qualname__} of dtype {value.dtype} and layout {value.layout}: only plain "
                "dense tensors travel, use .to_dense() or .dequantize()"
            )
        content = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return {
            MARK: "tensor",
            "at": self._blob(content.view(-1).view(torch.uint8) if content.numel() else bytearray()),
            "dtype": name,
            "shape": list(value.shape),
            "host": value.device.type == "cpu",
        }

    def _array(self, value: Any, path: str) -> Any:
        import numpy

        if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
            return self._pickle(value, path)
        code = value.dtype.str
        if _ARRAY.fullmatch(code) is None:
            if self._allow_pickle:
                return self._pickle(value, path)
            raise TransportError(
                f"{path} is a NumPy array of dtype {value.dtype}, which cannot travel: {REMEDY}"
            )
        content = numpy.ascontiguousarray(value)
        return {
            MARK: "array",
            "at": self._blob(bytearray(content.tobytes())),
            "dtype": code,
            "shape": list(value.shape),
            "scalar": isinstance(value, numpy.generic),
        }

    def _pickle(self, value: Any, path: str) -> Any:
        kind = type(value)
        if not self._allow_pickle:
            raise TransportError(
                f"{path} is of type {kind.__module__}.{kind.__qualname__}, which cannot travel: {REMEDY}"
            )
        try:
            content = bytearray(pickle.dumps(value))
        except Exception as error:
            raise TransportError(
                f"{path} is of type {kind.__qualname__}, which pickle refuses: {error}"
            ) from error
        self.pickled.append(path)
        return {MARK: "pickle", "at": self._blob(content)}

    def _blob(self, content: bytearray | Tensor) -> int:
        if not isinstance(content, Tensor):
            content = (
                torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            )
        self.blobs.append(content)
        return len(self.blobs) - 1


class _Unpacker:
    def __init__(self, blobs: Sequence[Tensor], device: torch.device, allow_pickle: bool) -> None:
        self._blobs = blobs
        self._device = device
        self._allow_pickle = allow_pickle
        self._readers: dict[str, Callable[[dict[str, Any], int], Any]] = {
            "int": lambda content, depth: int(content["hex"], 16),
            "float": lambda content, depth: float(content["text"]),
            "complex": lambda content, depth: complex(content["text"]),
            "bytes": lambda content, depth: to_bytes(self._blob(content)),
            "bytearray": lambda content, depth: bytearray(to_bytes(self._blob(content))),
            "dtype": lambda content, depth: _DTYPES[content["text"].removeprefix("torch.")],
            "device": lambda content, depth: torch.device(content["text"]),
            "tensor": self._tensor,
            "array": self._array,
            "dict": lambda content, depth: self._pairs({}, content, depth),
            "OrderedDict": lambda content, depth: self._pairs(OrderedDict(), content, depth),
            "dataclass": self._dataclass,
            "pickle": self._pickle,
            **dict.fromkeys(_SEQUENCES, self._sequence),
        }

    def read(self, content: Any, depth: int) -> Any:
        if depth > MOST_DEPTH + 1:
            raise TransportError(f"what arrived is deeper than {MOST_DEPTH} levels")
        if isinstance(content, list):
            return [self.read(item, depth + 1) for item in content]
        if not isinstance(content, dict):
            return content
        if MARK in content:
            kind = content[MARK]
            if not isinstance(kind, str) or kind not in self._readers:
                raise ValueError(f"{shown(kind)} is no kind of value")
            return self._readers[kind](content, depth)
        return {key: self.read(item, depth + 1) for key, item in content.items()}

    def _sequence(self, content: dict[str, Any], depth: int) -> Any:
        return _SEQUENCES[content[MARK]](self.read(item, depth + 1) for item in content["items"])

    def _pairs(self, target: Any, content: dict[str, Any], depth: int) -> Any:
        for key, item in content["pairs"]:
            target[self.read(key, depth + 1)] = self.read(item, depth + 1)
        return target

    def _blob(self, content: dict[str, Any]) -> Tensor:
        at = content["at"]
        if type(at) is not int or not 0 <= at < len(self._blobs):
            raise ValueError(f"it has {len(self._blobs)} pieces, and no {shown(at)}")
        return self._blobs[at]

    def _tensor(self, content: dict[str, Any], depth: int) -> Tensor:
        raw, dtype = self._blob(content), _DTYPES[content["dtype"]]
        result = raw.view(dtype) if raw.numel() else torch.empty(0, dtype=dtype)
        result = result.view(content["shape"])
        return result if content["host"] else result.to(self._device)

    def _array(self, content: dict[str, Any], depth: int) -> Any:
        import numpy

        if _ARRAY.fullmatch(content["dtype"]) is None:
            raise TransportError(f"what arrived holds an array of dtype {content['dtype']!r:.40}")
        dtype = numpy.dtype(content["dtype"])
        raw = bytearray(to_bytes(self._blob(content)))
        if dtype.itemsize:
            result = numpy.frombuffer(raw, dtype)
        else:
            result = numpy.zeros(math.prod(content["shape"]), dtype)
        result = result.reshape(content["shape"])
        return result[()] if content["scalar"] else result

    def _dataclass(self, content: dict[str, Any], depth: int) -> Any:
        module, name = content["module"], content["name"]
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not (isinstance(found, type) and _fillable(found)):
            raise TransportError(
                f"what arrived holds the dataclass {module}.{name}, which this rank does not know: import {module} on "
                "every rank before the call"
            )
        fields = {key: self.read(item, depth + 1) for key, item in content["fields"].items()}
        unknown = set(fields) - {field.name for field in dataclasses.fields(found)}
        if unknown:
            raise TransportError(
                f"what arrived holds a {module}.{name} with the fields {', '.join(sorted(unknown))}, which it does not "
                "have on this rank: run the same program everywhere"
            )
        result: Any = object.__new__(found)
        for key, item in fields.items():
            object.__setattr__(result, key, item)
        return result

    def _pickle(self, content: dict[str, Any], depth: int) -> Any:
        if not self._allow_pickle:
            raise TransportError(
                "what arrived is pickled: give allow_pickle=True if every rank is to be trusted"
            )
        return pickle.loads(to_bytes(self._blob(content)))


def _fillable(kind: type) -> bool:
    """A dataclass that others can find by its name and that is nothing else besides."""
    return (
        dataclasses.is_dataclass(kind)
        and kind.__new__ is object.__new__
        and "<locals>" not in kind.__qualname__
    )
