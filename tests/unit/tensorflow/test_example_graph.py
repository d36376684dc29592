"""`weft trace` of a Keras model: a graph that `weft partition` and `weft simulate` take."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from weft.cli.main import main  # noqa: E402
from weft.graph import Graph  # noqa: E402

SCRIPT = """
import keras
import tensorflow as tf

def example():
    layers = [keras.layers.Input((6,)), *(keras.layers.Dense(8, "relu") for _ in range(4)), keras.layers.Dense(3)]
    return keras.Sequential(layers), tf.zeros([8, 6]), lambda result: tf.reduce_mean(result ** 2)

def wrong():
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(8)]), tf.zeros([8, 5])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "keras_script.py"
    path.write_text(SCRIPT)
    return path


def test_a_graph_is_written_and_cut(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.graph.json"
    assert main(["trace", f"{script}:example", "--out", str(out), "--microbatches", "4"]) == 0
    graph = Graph.from_json(out.read_text())
    assert [unit.parameters for unit in graph] == [56, 72, 72, 72, 27]
    assert [unit.output_bytes for unit in graph] == [64, 64, 64, 64, 0]
    assert all(unit.forward_ms > 0 and unit.backward_ms > 0 for unit in graph)
    assert main(["partition", str(out), "--partitions", "2"]) == 0
    assert main(["simulate", str(out), "--partitions", "2"]) == 0
    assert "a step of" in capsys.readouterr().out


def test_a_model_that_fails_is_told(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", f"{script}:wrong", "--out", str(tmp_path / "x.graph.json")]) != 0
    assert "the model failed" in capsys.readouterr().err
