"""PipeDream's profiles: real ones, and faults by their line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.errors import FormatError
from weft.graph import Graph, Tensor, Unit, read_profile

PROFILES = Path(__file__).parents[2] / "data" / "profiles"


def layer(name, forward=1.0, backward=2.0, activation="64.000", parameter=0.0, kind="ReLU(inplace)"):
    return (
        f"{name} -- {kind} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
        f"activation_size={activation}, parameter_size={parameter:.3f}"
    )


@pytest.mark.parametrize(
    ("name", "units", "tensors"),
    [("vgg16", 41, 40), ("resnet50", 177, 176), ("densenet121", 429, 428), ("gnmt", 48, 39)],
)
def test_real_profiles(name, units, tensors):
    text = (PROFILES / f"{name}.txt").read_text(encoding="utf-8")
    graph = read_profile(text)
    assert (len(graph), len(graph.tensors)) == (units, tensors)
    assert sum(len(tensor.targets) for tensor in graph.tensors) == text.count("\n\t")
    times = map(float, re.findall("compute_time=([0-9.]+)", text))
    assert sum(unit.time_ms for unit in graph) == pytest.approx(sum(times))
    sizes = map(float, re.findall("parameter_size=([0-9.]+)", text))
    assert sum(unit.parameter_bytes for unit in graph) == sum(sizes)
    assert Graph.from_json(graph.to_json()) == graph


def test_of_the_ready_layers_the_smallest_number_comes_first():
    lines = [layer(f"node{number}") for number in (10, 9, 3, 2)]
    graph = read_profile("\n".join([*lines, "\tnode10 -- node2", "\tnode10 -- node9", "\tnode3 -- node9"]))
    assert [unit.name for unit in graph] == ["node3", "node10", "node2", "node9"]
    assert graph.tensors == (Tensor("node3", ("node9",), 64), Tensor("node10", ("node2", "node9"), 64))


def test_values_and_several_results():
    text = layer("node1", 0.5, 1.5, "[6291456.0; 131072.0]", 7168.0, "LSTM(  (a): b -- c)") + "\n\n"
    assert read_profile(text).units == (Unit("node1", 0.5, 1.5, 7168, 6422528, 6422528),)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "line 1: there is no layer: write"),
        ([layer("a"), "b"], 'line 2: "b" is not a layer: write "name -- layer -- forward_compute_time='),
        ([layer("a"), layer("a")], 'line 2: "a" is on line 1 already'),
        ([layer("a"), "\ta -- b -- c"], 'line 2: "a -- b -- c" is not an edge: write two names'),
        ([layer("a"), "\ta -- b"], 'line 2: there is no layer "b"'),
        (
            ["a -- ReLU -- forward_compute_time=1.0"],
            "line 1: backward_compute_time is missing; the layer has forw",
        ),
        ([layer("a", activation="much")], 'line 1: activation_size is "much", which is no number'),
        (
            [layer("a", forward=-1)],
            "line 1: forward_compute_time is -1.0, it must be a number from 0 to 1e+200",
        ),
        ([layer("a", forward=float("nan"))], "line 1: forward_compute_time is nan, it must be"),
        (
            [layer("a"), layer("b"), layer("c"), "\ta -- b", "\tb -- c", "\tc -- b"],
            'line 2: "b" needs its own result: the edges make a cycle',
        ),
    ],
)
def test_faults_name_their_line(lines, text):
    with pytest.raises(FormatError) as error:
        read_profile("\n".join(lines))
    assert text in str(error.value)
