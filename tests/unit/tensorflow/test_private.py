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
