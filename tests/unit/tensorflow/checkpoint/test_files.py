"""Values in the files of a checkpoint: tensors of all types, the user's content, and what nobody has written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from weft.checkpoint.index import Index  # noqa: E402
from weft.errors import CheckpointError, UsageError  # noqa: E402
from weft.tensorflow.checkpoint.tensor_files import ShardReader, array_of, stage, write_shard  # noqa: E402
from weft.tensorflow.checkpoint.user_values import decode, encode  # noqa: E402

NAME = "rank-0000.safetensors"
TYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
]


def test_tensors_of_all_types_come_back(tmp_path):
    values = {name: tf.cast([[0.0, 1.0, 3.0]], name) for name in TYPES}
    values |= {"scalar": tf.Variable(2.5), "keras": keras.Variable([1.0, 2.0]), "none": tf.zeros((0, 3))}
    shard, entries = write_shard(tmp_path, NAME, stage(values, False), lambda phase: None)
    reader = ShardReader(tmp_path, Index("a", 1, {NAME: shard}, entries))
    for path, value in values.items():
        found = reader.read(path)
        assert found.dtype.name == tf.as_dtype(value.dtype).name and found.shape == value.shape
        assert np.array_equal(found.numpy(), array_of(value)), path
    reader.close()


def test_what_no_file_holds_is_named():
    with pytest.raises(UsageError, match="model/words holds values of string, which a checkpoint cannot"):
        stage({"model/words": tf.constant("x")}, False)


def test_staged_tensors_stay_as_they_were():
    variable = tf.Variable([1.0, 2.0])
    staged = stage({"a": variable}, True)
    variable.assign([3.0, 4.0])
    assert staged["a"].tolist() == [1.0, 2.0]


VALUES: list[Any] = [
    None, True, 3, -(1 << 70), "text", [1, [2]], (1, (2,)), {"a": {"b": 1}}, {"$a": 1, 2: (3,)}, b"\x00x", 1.5,
    float("inf"), np.arange(6, dtype=">i2").reshape(2, 3), np.float32(2.5), np.zeros((0, 2)), [{"deep": [()]}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_the_users_content_comes_back(value):
    tensors: dict[str, Any] = {}
    found = decode(encode(value, tensors), lambda path: array_of(tensors[path]))
    assert type(found) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        assert found.dtype == value.dtype and found.shape == value.shape
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


@pytest.mark.parametrize(
    "value", [{1}, object(), np.array(["a"]), {"x": [1, print]}, 1j], ids=lambda value: type(value).__name__
)
def test_other_content_is_refused_by_name(value):
    with pytest.raises(UsageError, match="user_content.* is a .*: a checkpoint holds numbers, texts"):
        encode(value, {})


def test_content_that_holds_itself_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UsageError, match="lies deeper than 100 levels"):
        encode(endless, {})


DAMAGED: list[Any] = [
    {"$pickle": "gASVAAAA"}, {"$int": "0xg"}, {"$bytes": "*"}, {"$tuple": 3}, {"$dict": [[1]]}, {"$dict": [[[], 1]]},
    {"$numpy": ["user/0", "O", [1]]}, {"$numpy": ["user/0", "<f4", [1 << 80]]}, {"$numpy": ["user/0", "<f4", [5]]},
    {"$numpy": ["user/9", "<f4", [1]]}, {"$numpy": 1}, {"$tensor": [1]}, {"$scalar": ["user/0", "<f4", [-1]]},
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=repr)
def test_content_that_nobody_wrote_is_refused(content):
    with pytest.raises(CheckpointError, match="of the user's content"):
        decode(content, {"user/0": np.zeros(4, np.uint8)}.__getitem__)


def test_content_that_is_too_deep_is_refused():
    content: Any = 1
    for _ in range(200):
        content = [content]
    with pytest.raises(CheckpointError, match="more than 100 levels deep"):
        decode(content, dict[str, Any]().__getitem__)
