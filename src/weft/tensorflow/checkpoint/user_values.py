"""The user's content of a save as JSON, with tensors beside it. Reading runs no code that a file brings along.

Numbers, texts, None, lists, and dicts whose keys are texts without ``$`` are JSON. All else is an object with one
member, whose name is a tag; it means the same in checkpoints of ``weft.torch``:

    $tensor   where the tensor lies            $tuple          list
    $numpy    [where, dtype, shape]            $dict           [[key, value], ...]
    $scalar   the same, of a NumPy scalar      $int, $float    text
    $bytes    base64
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from weft.errors import CheckpointError, UsageError
from weft.tensorflow import private
from weft.untrusted import LARGEST, shown, shown_text, translated

MAX_DEPTH = 100
_NUMBERS = re.compile(r"[<>|=]?[biufc]\d{1,9}")


def encode(value: Any, tensors: dict[str, Any], path: str = "user_content", depth: int = 0) -> Any:
    """``value`` as JSON; its tensors go into ``tensors``, under paths that begin with ``user/``.

    Raises:
        UsageError: It holds something else than numbers, texts, lists, dicts, tensors and arrays; that is named.
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() < 64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if depth > MAX_DEPTH:
        raise UsageError(f"{path} lies deeper than {MAX_DEPTH} levels: flatten it")

    def put(tensor: Any) -> str:
        where = f"user/{len(tensors)}"
        tensors[where] = tensor
        return where

    def items(values: Any) -> list[Any]:
        return [encode(item, tensors, f"{path}[{number}]", depth + 1) for number, item in enumerate(values)]

    if isinstance(value, list):
        return items(value)
    if kind is tuple:
        return {"$tuple": items(value)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
        return {"$dict": [items(pair) for pair in value.items()]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and _NUMBERS.fullmatch(value.dtype.str):
        raw = np.frombuffer(value.tobytes(), np.uint8)
        tag = "$numpy" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: [put(raw), value.dtype.str, list(value.shape)]}
    if tf.is_tensor(private.underlying(value)) or isinstance(private.underlying(value), tf.Variable):
        return {"$tensor": put(value)}
    raise UsageError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds numbers, texts, lists, dicts, tensors "
        "and NumPy arrays; convert the value"
    )


def decode(content: Any, array: Callable[[str], Any], depth: int = 0) -> Any:
    """The value that ``encode`` was given. ``array(path)``: a tensor of the checkpoint, as an array.

    Raises:
        CheckpointError: It is not as ``encode`` wrote it.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"the user's content is more than {MAX_DEPTH} levels deep: do not use it")
    if isinstance(content, list):
        return [decode(item, array, depth + 1) for item in content]
    if not isinstance(content, dict):
        return content
    tag = next(iter(content), "")
    if len(content) != 1 or not tag.startswith("$"):
        return {key: decode(item, array, depth + 1) for key, item in content.items()}
    if tag not in _READERS:
        raise CheckpointError(f"{shown_text(tag)} of the user's content is unknown to weft.tensorflow")
    with translated(f"{tag} of the user's content cannot be read", CheckpointError):
        inside = content[tag]
        if tag in ("$tuple", "$dict"):
            inside = [decode(item, array, depth + 1) for item in inside]
        return _READERS[tag](inside, array)


def _read_array(content: Any, array: Callable[[str], Any]) -> Any:
    where, name, shape = content
    if not isinstance(name, str) or _NUMBERS.fullmatch(name) is None:
        raise ValueError(f"{shown(name)} is no dtype of numbers")
    if not all(type(dim) is int and 0 <= dim <= LARGEST for dim in shape):
        raise ValueError("its shape cannot be")
    return np.frombuffer(array(where).tobytes(), np.dtype(name)).reshape(shape)


_READERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "$int": lambda content, array: int(content, 16),
    "$float": lambda content, array: float(content),
    "$bytes": lambda content, array: base64.b64decode(content, validate=True),
    "$tuple": lambda content, array: tuple(content),
    "$dict": lambda content, array: dict(content),
    "$tensor": lambda content, array: tf.constant(array(content)),
    "$numpy": _read_array,
    "$scalar": lambda content, array: _read_array(content, array)[()],
}
