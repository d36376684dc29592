import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import FormatError
from weft.graph.model import Graph, Tensor, Unit

EMBEDDING = Unit("embedding", 0.1, 0.2, 4096, 0, output_bytes=64, parameters=1024, group="tied")
BLOCK = Unit("blocks.0", 1.0, 2.0, 8192, 512)
HEAD = Unit("head", 0.5, 1.0, 0, 64, group="tied")
GRAPH = Graph((EMBEDDING, BLOCK, HEAD))


def test_groups_and_times():
    assert GRAPH.groups == {"tied": (0, 2)}
    assert BLOCK.time_ms == 3.0
    assert len(GRAPH) == 3
    assert list(GRAPH) == [EMBEDDING, BLOCK, HEAD]


def test_json_gives_the_same_graph():
    assert Graph.from_json(GRAPH.to_json()) == GRAPH


def test_tensors_are_a_chain_unless_they_are_given():
    assert GRAPH.tensors == (Tensor("embedding", ("blocks.0",), 64), Tensor("blocks.0", ("head",), 0))
    skips = Graph(GRAPH.units, [Tensor("embedding", ("head", "blocks.0"), 64)])
    assert skips.flows == ((0, (1, 2), 64),)
    assert skips != GRAPH
    assert Graph.from_json(skips.to_json()) == skips
    assert Graph(GRAPH.units, ()).tensors == ()


@given(st.data())
def test_any_graph_is_read_back_exactly(data):
    names = data.draw(st.lists(st.text(), unique=True, max_size=5))
    number = st.floats(0, 1e200)
    whole = st.integers(0, 2**63 - 1)
    group = st.none() | st.text(max_size=2)
    fields = (number, number, whole, whole, whole, whole, group)
    units = [Unit(name, *(data.draw(field) for field in fields)) for name in names]
    tensors = [
        Tensor(source, tuple(targets), data.draw(whole))
        for place, source in enumerate(names[:-1])
        if (targets := data.draw(st.lists(st.sampled_from(names[place + 1 :]))))
    ]
    graph = Graph(units, data.draw(st.sampled_from([None, tensors])))
    assert Graph.from_json(graph.to_json()) == graph


def test_a_short_file_by_hand():
    text = """{"weft": "graph", "version": 1, "units": [
        {"name": "a", "forward_ms": 1, "backward_ms": 2, "parameter_bytes": 3, "activation_bytes": 4},
        {"name": "b", "forward_ms": 1, "backward_ms": 2, "parameter_bytes": 3, "activation_bytes": 4}]}"""
    assert Graph.from_json(text) == Graph([Unit("a", 1, 2, 3, 4), Unit("b", 1, 2, 3, 4)])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"from": "x"}, r'\$.tensors\[0\].from: there is no unit "x"'),
        ({"to": ["head", "x"]}, r'\$.tensors\[0\].to\[1\]: there is no unit "x"'),
        (
            {"to": ["embedding"]},
            r'to\[0\]: "embedding" does not come after "embedding", but units stand in prog',
        ),
        ({"bytes": 10**201}, r"\$.tensors\[0\].bytes: expected a whole number up to 922"),
        ({"bytes": -1}, r"\$.tensors\[0\].bytes: -1 is negative"),
        ({"to": "head"}, r'\$.tensors\[0\].to: expected an array, found string "head"'),
        ({"size": 1}, r'\$.tensors\[0\]: "size" is unknown here; known are from, to, bytes'),
    ],
)
def test_faults_of_tensors_name_their_path(change, text):
    document = json.loads(GRAPH.to_json())
    document["tensors"][0].update(change)
    with pytest.raises(FormatError, match=text):
        Graph.from_json(json.dumps(document))


def test_faults_of_the_whole_file():
    for text, fault in (
        ("{", "this is not JSON, so it cannot be a graph"),
        ("[" * 100_000, "this is not JSON, so it cannot be a graph .it is nested too deeply"),
        ("[]", r"\$: expected an object"),
        (
            '{"weft": "graph", "version": 2}',
            r"\$.version: this graph has version 2, and this weft reads version 1",
        ),
        (
            '{"weft": "graph", "version": 1, "units": [], "edges": []}',
            r'\$: "edges" is unknown here; known are weft',
        ),
        (
            '{"weft": "graph", "version": 1, "units": [3]}',
            r"\$.units\[0\]: expected an object, found number 3",
        ),
    ):
        with pytest.raises(FormatError, match=fault):
            Graph.from_json(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "embedding"}, r'\$.units\[1\].name: there is a unit "embedding" already'),
        ({"forward_ms": -1}, r"\$.units\[1\].forward_ms: -1.0 is negative \(unit blocks.0\)"),
        (
            {"parameter_bytes": 1.5},
            r"\$.units\[1\].parameter_bytes: expected a whole number, found number 1.5",
        ),
        (
            {"forward_ms": 1e201},
            r"units\[1\].forward_ms: 1e\+201 is not a number up to 1e\+200 \(unit blocks.0\)",
        ),
        ({"parameter_bytes": 10**201}, r"units\[1\].parameter_bytes: expected a whole number up to 922"),
        (
            {"forward_ms": 10**400},
            r"units\[1\].forward_ms: expected a finite number, found number .a number of more",
        ),
        ({"forward": 1}, r'\$.units\[1\]: "forward" is unknown here; known are name, forward_ms'),
        ({"group": 3}, r"\$.units\[1\].group: expected a string"),
    ],
)
def test_faults_name_their_path(change, text):
    document = json.loads(GRAPH.to_json())
    document["units"][1].update(change)
    with pytest.raises(FormatError, match=text):
        Graph.from_json(json.dumps(document))


def test_a_missing_field():
    document = json.loads(GRAPH.to_json())
    del document["units"][2]["backward_ms"]
    with pytest.raises(FormatError, match=r'\$.units\[2\]: "backward_ms" is missing'):
        Graph.from_json(json.dumps(document))


HALVES = st.none() | st.tuples(st.floats(0, 1e9), st.floats(0, 1e9))


@given(st.lists(HALVES, max_size=4))
def test_the_halves_of_the_backward_pass_are_read_back_exactly(pairs):
    units = [Unit(f"u{i}", 1, 2, 3, 4, **named(pair)) for i, pair in enumerate(pairs)]
    graph = Graph(units)
    assert Graph.from_json(graph.to_json()) == graph
    assert [unit.halves_ms for unit in graph] == [(1.0, 1.0) if pair is None else pair for pair in pairs]


def named(pair):
    return {} if pair is None else dict(zip(("input_ms", "weight_ms"), pair, strict=True))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input_ms": -1, "weight_ms": 1}, r"^\$.units\[1\].input_ms: -1.0 is negative \(unit blocks.0\)$"),
        (
            {"input_ms": 1},
            r"\[1\]: input_ms is given without weight_ms \(unit blocks.0\): give both, or none$",
        ),
        ({"weight_ms": 1}, r"\[1\]: weight_ms is given without input_ms \(unit blocks.0\): give both"),
        ({"weight_ms": "x"}, r'\$.units\[1\].weight_ms: expected a number, found string "x"'),
    ],
)
def test_faults_of_the_halves(change, text):
    document = json.loads(GRAPH.to_json())
    document["units"][1].update(change)
    with pytest.raises(FormatError, match=text):
        Graph.from_json(json.dumps(document))
