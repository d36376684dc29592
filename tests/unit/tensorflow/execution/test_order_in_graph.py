"""Microbatches that wait for each other in a graph of TensorFlow's: its optimiser must leave their order alone.

It moves operations that follow each output of a ``tf.split`` to before the split, with all that these wait for. So
microbatch 1, which waits for microbatch 0, made that one wait for itself. TensorFlow then gave up its own optimisation
of the step, and said on stderr that the graph could not be sorted.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

SCRIPT = """
import tensorflow as tf
from weft.session.cut import Cut
from weft.tensorflow import private
from weft.tensorflow.mini_batch import prepare

weight = tf.Variable(tf.ones([4, 4]))
phase = tf.function(lambda x: x @ weight).get_concrete_function(tf.TensorSpec([2, 4]))


@tf.function
def step(x):
    found, before = [], [tf.py_function(lambda: 0, [], tf.int32).op]
    slices = prepare(lambda x: x, (x,), {}, Cut(), 4).slices([x])
    for (part,) in SLICES:
        with tf.control_dependencies(before):
            (result,), before = private.call_in_graph(phase, [part])
        found.append(result)
    return found


assert [each.numpy().tolist() for each in step(tf.ones([8, 4]))] == [[[4.0] * 4] * 2] * 4
"""
MESSAGE = "couldn't be sorted in topological order"


SLICES = {"weft": "slices", "split": "[[part] for part in tf.split(x, 4)]"}


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What TensorFlow says of each way to slice. Its process starts cold: it would be told to say little otherwise."""
    end = "\nimport sys; print('---', file=sys.stderr, flush=True)\n"
    run = subprocess.run(
        [sys.executable, "-c", "".join(SCRIPT.replace("SLICES", each) + end for each in SLICES.values())],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return dict(zip(SLICES, run.stderr.split("---\n"), strict=False))


@pytest.mark.parametrize(("slices", "warned"), [("weft", False), ("split", True)])
def test_microbatches_do_not_wait_for_themselves(told: dict[str, str], slices: str, warned: bool) -> None:
    assert (MESSAGE in told[slices]) == warned, told[slices]
