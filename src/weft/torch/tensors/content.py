"""Values of a script as JSON and tensors, and back: what a checkpoint holds besides the model runs no code when read.

Numbers, texts, lists, dicts and None are JSON. All else is an object with one member that begins with ``$``:

    $tensor   path            $tuple   list        $dict   [[key, value], ...]    $float   "nan", "inf", "-inf"
    $numpy    [path, dtype]   $set     list        $bytes  base64                 $dtype, $device   text
    $scalar   [path, dtype]   $namespace  object   $int    hexadecimal text, from 64 bits on
    $pickle   base64, only where it was asked for
"""

from __future__ import annotations

import argparse
import base64
import collections
import math
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError, UsageError
from weft.foreign import LARGEST, shown, shown_text, translated
from weft.transport.torch_dist import to_bytes

_PLAIN = (bool, int, str, type(None))
MAX_DEPTH = 100


class Encoder:
    """Turns values into JSON; the tensors in them go into ``tensors`` under ``prefix``.

    Args:
        tensors: Where the tensors go.
        prefix: What their paths begin with.
        allow_pickle: Whether an object of another type is pickled rather than refused.
    """

    def __init__(self, tensors: dict[str, Tensor], prefix: str, allow_pickle: bool = False) -> None:
        self.tensors = tensors
        self.prefix = prefix
        self.allow_pickle = allow_pickle
        self.faults: list[str] = []

    def encode(self, value: Any, what: str) -> Any:
        """``value`` as JSON; ``what`` names it in the error, which lists everything that cannot be saved."""
        self.faults = []
        result = self._encode(value, what, 0)
        if self.faults:
            raise UsageError(
                f"{'; '.join(self.faults)}: a checkpoint holds numbers, texts, lists, dicts, tensors and NumPy arrays; "
                "convert the value (objects with state_dict() go into also=), or pass allow_pickle=True"
            )
        return result

    def _encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UsageError(f"{path}: more than {MAX_DEPTH} levels deep, or a part of itself")
        if (
            type(value) is int and value.bit_length() > 63
        ):  # the text of a longer one may be refused by Python
            return {"$int": hex(value)}
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._add(value.detach())}
        if isinstance(value, Mapping) and type(value) in (
            dict,
            collections.OrderedDict,
            collections.defaultdict,
        ):
            return self._mapping(value, path, depth)
        if type(value) in (list, tuple, set, frozenset, torch.Size):
            items = [self._encode(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
            return items if type(value) is list else {"$tuple" if isinstance(value, tuple) else "$set": items}
        if isinstance(value, (torch.dtype, torch.device)):
            return {
                "$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")
            }
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, argparse.Namespace):
            return {"$namespace": self._encode(vars(value), path, depth + 1)}
        return self._other(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self._encode(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [
                self._encode(key, f"{path}'s key {key!r}", depth + 1),
                self._encode(item, f"{path}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]
        return {"$dict": pairs}

    def _other(self, value: Any, path: str) -> Any:
        numpy = sys.modules.get("numpy")
        if (
            numpy is not None
            and isinstance(value, (numpy.ndarray, numpy.generic))
            and value.dtype.kind in "biufc"
        ):
            array = numpy.atleast_1d(numpy.ascontiguousarray(value)).reshape(-1)
            at = self._add(torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8))
            kind = "$numpy" if isinstance(value, numpy.ndarray) else "$scalar"
            return {kind: [at, value.dtype.str, list(value.shape)]}
        if self.allow_pickle:
            return {"$pickle": base64.b64encode(pickle.dumps(value)).decode()}
        self.faults.append(f"{path} is a {type(value).__module__}.{type(value).__qualname__}")
        return None

    def _add(self, tensor: Tensor) -> str:
        path = f"{self.prefix}/{len(self.tensors)}"
        self.tensors[path] = tensor
        return path


class Unread:
    """Stands for a pickled object that was not read."""

    def __repr__(self) -> str:
        return "<a pickled object that was not read>"


class Decoder:
    """The way back.

    Args:
        read: Gives the tensor of a path.
        allow_pickle: Whether pickled objects may run their code; "leave" puts an :class:`Unread` in their place.
    """

    def __init__(self, read: Callable[[str], Tensor], allow_pickle: bool | str = False) -> None:
        self.read = read
        self.allow_pickle = allow_pickle

    def decode(self, value: Any) -> Any:
        """The value that :class:`Encoder` wrote; :class:`CheckpointError` if it did not."""
        return self._decode(value, 0)

    def _decode(self, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"a value of a checkpoint is more than {MAX_DEPTH} levels deep: do not use it"
            )
        if isinstance(value, list):
            return [self._decode(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        kind = next(iter(value), "")
        if len(value) != 1 or not kind.startswith("$"):
            return {key: self._decode(item, depth + 1) for key, item in value.items()}
        with translated(f"{shown_text(kind)} of a checkpoint cannot be read", CheckpointError):
            return self._special(kind, value[kind], depth + 1)

    def _special(self, kind: str, content: Any, depth: int) -> Any:
        if kind == "$tensor":
            return self.read(content)
        if kind in ("$tuple", "$set"):
            items = [self._decode(item, depth) for item in content]
            return tuple(items) if kind == "$tuple" else set(items)
        if kind == "$dict":
            return {self._decode(key, depth): self._decode(item, depth) for key, item in content}
        if kind == "$int":
            return int(content, 16)
        if kind == "$float":
            return float(content)
        if kind == "$bytes":
            return base64.b64decode(content, validate=True)
        if kind == "$namespace":
            return argparse.Namespace(**self._decode(content, depth))
        if kind == "$dtype":
            return named_dtype(content)
        if kind == "$device":
            return torch.device(content)
        if kind in ("$numpy", "$scalar"):
            import numpy

            path, dtype, shape = content
            made = numpy.dtype(dtype) if isinstance(dtype, str) else numpy.dtype(object)
            if made.kind not in "biufc":
                raise ValueError(f"{shown(dtype)} is no dtype of numbers")
            if not all(type(dim) is int and 0 <= dim <= LARGEST for dim in shape):
                raise ValueError("its shape cannot be")
            size = math.prod(shape) * made.itemsize
            array = numpy.frombuffer(to_bytes(self.read(path))[:size], made).reshape(shape).copy()
            return array if kind == "$numpy" else array[()]
        if kind == "$pickle":
            if self.allow_pickle == "leave":
                return Unread()
            if not self.allow_pickle:
                raise CheckpointError(
                    "this checkpoint holds a pickled object, which may run any code when it is read: pass "
                    "allow_pickle=True if you trust whoever wrote it"
                )
            return pickle.loads(base64.b64decode(content, validate=True))
        raise CheckpointError(f"{shown_text(kind)} of a checkpoint is unknown to this version of weft")


def named_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as ``float32``.

    >>> named_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{shown(name)} is no dtype of this version of torch")
    return found
