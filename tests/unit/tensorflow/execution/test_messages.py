"""What ranks tell each other of the step that they were called with."""

from __future__ import annotations

import json

import pytest

tf = pytest.importorskip("tensorflow")

from weft.tensorflow.execution.messages import SAMPLES, describe_call  # noqa: E402

MANY = 4 * SAMPLES


def describe(*tensors, everything=False):
    return json.loads(describe_call("train", [f"x[{n}]" for n in range(len(tensors))], tensors, everything))


def test_types_shapes_and_a_digest():
    found = describe(tf.ones((2, 3)), tf.constant(1, tf.int64))
    assert list(found) == ["step", "x[0]", "some values in x[0]", "x[1]", "some values in x[1]"]
    assert (found["step"], found["x[0]"], found["x[1]"]) == ("train", "float32[2, 3]", "int64[]")
    assert len(found["some values in x[0]"]) == 12


def test_the_digest_follows_the_values():
    values = tf.range(float(MANY))
    again = describe(tf.range(float(MANY)))
    assert describe(values) == again != describe(values + 1.0)
    later = tf.tensor_scatter_nd_update(values, [[1]], [9.0])  # between those that are compared
    assert describe(later) == again
    assert describe(later, everything=True) != describe(values, everything=True)
    assert "the values in x[0]" in describe(values, everything=True)


@pytest.mark.parametrize("empty", [tf.zeros((0, 4)), tf.zeros(())])
def test_few_values(empty):
    assert describe(empty) == describe(tf.identity(empty))


def test_texts_have_no_digest():
    assert describe(tf.constant(["a", "b"])) == {"step": "train", "x[0]": "string[2]"}


def test_half_precision():
    assert describe(tf.ones(3, tf.bfloat16)) != describe(tf.zeros(3, tf.bfloat16))
