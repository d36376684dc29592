"""The values that a script of TensorFlow says."""

from __future__ import annotations

import json

import pytest

tf = pytest.importorskip("tensorflow")

import weft.tensorflow as weft  # noqa: E402
from weft.errors import UsageError  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    weft.init({"log_dir": str(tmp_path), "microbatches": 2})
    try:
        yield tmp_path
    finally:
        weft.shutdown()


def test_values_are_kept_with_their_step(folder):
    step = weft.step(lambda x: tf.reduce_mean(x))
    for number in weft.progress(range(2)):
        loss = step(tf.constant([1.0, 2.0 + number]))
        weft.log(
            {"loss": loss, "half": loss.reduce_mean() / 2, "one": tf.Variable([3]), "name": "run"}, number
        )
    (file,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [(line["step"], line["values"]) for line in lines if "values" in line]
    assert kept == [
        (0, {"loss": 1.5, "half": 0.75, "one": 3, "name": "run"}),
        (1, {"loss": 2.0, "half": 1.0, "one": 3, "name": "run"}),
    ]


def test_what_is_no_value_is_refused(folder):
    with pytest.raises(UsageError, match=r"logits has \[2, 3\] elements: log a number"):
        weft.log({"logits": tf.zeros([2, 3])})

    @tf.function
    def inside(x):
        weft.log({"x": x})

    with pytest.raises(UsageError, match="x is .*: log numbers, texts and tensors with one element"):
        inside(tf.constant(1.0))
