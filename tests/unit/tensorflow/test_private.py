"""What weft takes for granted of TensorFlow's own names."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from weft.tensorflow import private  # noqa: E402


def test_operations_are_numbered_as_they_are_made():
    with private.step_graph("numbers") as graph:
        first = private.placeholder(tf.float32, (2,), "first")
        assert private.made(graph) == private.number_of(first.op)
        before = private.made(graph)
        second = first + 1.0
        inside = [each.name for each in graph.get_operations() if private.number_of(each) > before]
        assert inside == ["add/y", "add"]
        assert private.made(graph) == private.number_of(second.op)


def test_a_model_whose_constructor_has_not_run_is_no_model():
    """Functional models of keras_hub leave such objects behind."""

    class Unmade(tf.keras.Model):
        """Anything."""

    unmade, made = (
        Unmade.__new__(Unmade),
        tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)]),
    )
    vars(unmade).pop("built", None)
    found = private.plain_models()
    assert not any(each is unmade for each in found) and any(each is made for each in found)
