"""TensorFlow's tensors to and from the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from weft.checkpoint import shard
from weft.checkpoint.index import ITEM_BYTES, Entry, Shard
from weft.errors import CheckpointError, UsageError
from weft.tensorflow import private
from weft.untrusted import shown_text, translated


def stage(tensors: Mapping[str, Any], copy: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Variables, tensors and arrays as arrays in host memory; with ``copy`` apart from the given ones.

    Raises:
        UsageError: Tensors of that type cannot be saved.
    """
    staged: dict[str, np.ndarray[Any, Any]] = {}
    for path, tensor in tensors.items():
        value = private.underlying(tensor)
        if tf.as_dtype(value.dtype).name not in ITEM_BYTES:
            raise UsageError(
                f"{path} holds values of {tf.as_dtype(value.dtype).name}, which a checkpoint cannot: "
                f"it holds {', '.join(ITEM_BYTES)}"
            )
        staged[path] = array_of(value, copy)
    return staged


def array_of(tensor: Any, copy: bool = False) -> np.ndarray[Any, Any]:
    """A variable, tensor or array as an array; with ``copy`` apart from the given one."""
    value = private.underlying(tensor)
    return np.array(value.numpy() if hasattr(value, "numpy") else value, copy=copy or None)


def write_shard(
    folder: Path,
    name: str,
    tensors: Mapping[str, np.ndarray[Any, Any]],
    reached: Callable[[str], None],
) -> tuple[Shard, dict[str, Entry]]:
    """Write a file of staged tensors; what the index says of the file, which is on the disk when this returns."""
    contents = {path: (array.dtype.name, array.shape, _bytes_of(array)) for path, array in tensors.items()}
    return shard.write(folder, name, contents, reached)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class ShardReader(shard.Reader):
    """Reads tensors of one checkpoint, each by the range of bytes that holds it."""

    def read(self, path: str) -> Any:
        """The tensor of a path; :class:`CheckpointError` if its bytes are not those that were saved."""
        return tf.constant(self.array(path))

    def array(self, path: str) -> np.ndarray[Any, Any]:
        """The same as an array."""
        with translated(f"{shown_text(str(path))} cannot be read", CheckpointError):
            entry, content = self.content(path)
            dtype = tf.as_dtype(entry.dtype).as_numpy_dtype
            return np.frombuffer(content, dtype).reshape(entry.shape)
