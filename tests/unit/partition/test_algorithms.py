"""One battery for every algorithm; the exact ones against trying everything, and an integer program."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.oracle import exhaustive, integer_program, legal, problems
from weft.errors import PlacementError
from weft.graph import Graph, Tensor, Unit, read_profile
from weft.partition import ALGORITHMS, Device, Placement, Problem, in_flight, place
from weft.partition.chain import search as search_module

PROFILES = Path(__file__).parents[2] / "data" / "profiles"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_every_placement_keeps_the_rules(algorithm, problem):
    """Groups lie together, limits are kept, and nothing is below the bound or the oracle."""
    try:
        placement = place(problem, algorithm)
    except PlacementError:
        return
    assert len(placement.partitions) == len(problem.graph)
    assert not placement.excess_bytes
    for units in problem.graph.groups.values():
        assert len({placement.partitions[unit] for unit in units}) == 1
    assert placement.largest_cost >= placement.bound * (1 - 1e-9)
    assert sum(load.parameter_bytes for load in placement.loads) == sum(
        unit.parameter_bytes for unit in problem.graph
    )


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_exact_equals_trying_everything(problem):
    best = exhaustive(problem)
    if best is None:
        with pytest.raises(PlacementError, match="no placement keeps within the memory limits"):
            place(problem)
    else:
        placement = place(problem)
        assert placement.largest_cost == pytest.approx(best, abs=1e-12)
        assert placement.optimal


@settings(max_examples=200, deadline=None)
@given(problem=problems(units=9, partitions=4, devices=False, limits=False, groups=False))
def test_tensors_that_pass_segments_by(problem):
    """Longer programs, where skip connections pass whole partitions by."""
    assert place(problem).largest_cost == pytest.approx(exhaustive(problem), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(problem=problems(units=16, partitions=4))
def test_exact_equals_an_integer_program(problem):
    best = integer_program(problem)
    if best is not None:
        assert place(problem).largest_ms == pytest.approx(best, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(problem=problems(units=7, partitions=3, chunks=2, groups=False))
def test_chunks_against_trying_everything(problem):
    best = exhaustive(problem, empty=False)
    try:
        placement = place(problem)
    except PlacementError as error:
        assert best is None or "no placement was found" in str(error)
        return
    assert best is not None
    assert best - 1e-12 <= placement.largest_cost
    assert placement.bound <= best + 1e-12
    if placement.optimal:
        assert placement.largest_cost == pytest.approx(best, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(problem=problems(units=7, partitions=2, chunks=3, transfers=False, groups=False))
def test_small_problems_with_chunks_are_solved(problem):
    if exhaustive(problem, empty=False) is not None:
        assert place(problem).optimal


@settings(max_examples=50, deadline=None)
@given(problem=problems(limits=False))
def test_coordinate_descent_is_a_placement_above_its_bound(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "COMBINATIONS", 0)
        placement = place(problem)
    assert placement.bound <= exhaustive(problem) + 1e-12
    assert placement.segments in {other.segments for other in legal(problem)}


@pytest.mark.parametrize(
    ("name", "largest_ms"),
    [
        ("vgg16", (377.045, 221.860, 159.531, 159.531)),
        ("resnet50", (232.932, 116.674, 60.391, 31.504)),
        ("densenet121", (167.778, 84.982, 43.025, 21.701)),
    ],
)
def test_known_optima(name, largest_ms):
    graph = read_profile((PROFILES / f"{name}.txt").read_text(encoding="utf-8"))
    found = [place(Problem(graph, partitions)).largest_ms for partitions in (2, 4, 8, 16)]
    assert found == pytest.approx(largest_ms, abs=5e-4)


def test_the_integer_program_agrees_on_a_real_network():
    """Times in microseconds, so that the program's numbers are whole."""
    graph = read_profile((PROFILES / "vgg16.txt").read_text(encoding="utf-8"))
    graph = Graph(
        Unit(unit.name, round(1e3 * unit.forward_ms), round(1e3 * unit.backward_ms), 0, 0) for unit in graph
    )
    assert integer_program(Problem(graph, 4)) == place(Problem(graph, 4)).largest_ms == 221_860


def chain(times, sizes=None, **costs):
    sizes = [0] * len(times) if sizes is None else sizes
    return Graph(
        Unit(f"u{i}", time, 0.0, costs.get("parameters", 0), costs.get("activations", 0), size)
        for i, (time, size) in enumerate(zip(times, sizes, strict=True))
    )


def ms(size):
    return size / 2e3


def test_a_cut_goes_where_little_crosses():
    graph = chain([2, 2, 2, 2], sizes=[1, 9, 1, 0])
    assert place(Problem(graph, 2)).partitions == (0, 0, 1, 1)
    placement = place(Problem(graph, 2, transfer_s=ms))
    assert placement.partitions == (0, 1, 1, 1)
    assert [(load.compute_ms, load.transfer_ms) for load in placement.loads] == [(2, 1), (6, 1)]


def test_skip_connections_count_once_for_each_partition():
    """u0 goes to u1 and u3 on partition 1, once, and to u4 on partition 2; u0 sends it once."""
    graph = Graph(chain([1] * 5), [Tensor("u0", ("u1", "u3", "u4"), 4), Tensor("u3", ("u4",), 2)])
    placement = Placement(Problem(graph, 3, transfer_s=ms), (0, 1, 1, 1, 2))
    assert [load.transfer_ms for load in placement.loads] == [4, 4 + 2, 4 + 2]


def test_a_faster_device_gets_more():
    graph = chain([1] * 9)
    placement = place(Problem(graph, 2, devices=(Device(2.0), Device(1.0))))
    assert placement.partitions == (0,) * 6 + (1,) * 3
    assert placement.largest_ms == 3


def test_the_first_partition_holds_the_most_microbatches():
    """1F1B: 4, 3, 2, 1 microbatches in flight; 12 bytes hold 3, 4, 6, 12 units' activations."""
    graph = chain([1] * 16, activations=1)
    devices = (Device(memory_bytes=12),) * 4
    problem = Problem(graph, 4, devices=devices, in_flight=in_flight(4, 8))
    placement = place(problem)
    assert [placement.partitions.count(p) for p in range(4)] == [3, 4, 5, 4]
    assert [load.memory_bytes for load in placement.loads] == [12, 12, 10, 4]
    assert place(Problem(graph, 4)).largest_ms == 4


def test_memory_weight_moves_from_time_to_memory():
    graph = Graph(
        [Unit("a", 3, 0, 0, 0), Unit("b", 1, 0, 1, 0), Unit("c", 1, 0, 1, 0), Unit("d", 1, 0, 2, 0)]
    )
    assert place(Problem(graph, 2, memory_weight=0.0)).partitions == (0, 1, 1, 1)
    assert place(Problem(graph, 2, memory_weight=1.0)).partitions == (0, 0, 0, 1)


def test_looped_and_v_shaped():
    graph = chain([1, 2, 3, 4, 4, 3, 2, 1])
    looped = place(Problem(graph, 2, chunks=2))
    assert looped.segments == tuple(sorted(looped.segments))
    assert set(looped.segments) == {0, 1, 2, 3}
    assert [load.compute_ms for load in looped.loads] == [10, 10] and looped.optimal
    vee = place(Problem(graph, 2, chunks=2, layout="v"))
    assert vee.partitions[0] == vee.partitions[-1] == 0
    assert sorted(load.compute_ms for load in vee.loads) == [9, 11] and vee.optimal


def test_v_shape_has_no_transfer_at_its_turn():
    graph = chain([1] * 4, sizes=[5, 5, 5, 0])
    placement = place(Problem(graph, 2, chunks=2, layout="v", transfer_s=ms))
    assert placement.partitions == (0, 1, 1, 0)
    assert [load.transfer_ms for load in placement.loads] == [10, 10]


def test_tied_units_in_chunks():
    units = [*chain([1] * 8)]
    units[0] = Unit("u0", 1, 0, 0, 0, group="tied")
    units[7] = Unit("u7", 1, 0, 0, 0, group="tied")
    placement = place(Problem(Graph(units), 2, chunks=2))
    assert placement.partitions[0] == placement.partitions[7]
    assert placement.largest_ms == 4 and placement.optimal


def test_a_tensor_that_passes_by_leaves_no_partition_empty():
    """All units on the fast device would be best, but then the other one would have none."""
    units = [
        Unit(f"u{i}", time, 0, 0, 0, group=group)
        for i, (time, group) in enumerate([(3, None), (4, "a"), (0, None), (5, None), (18, None), (6, "a")])
    ]
    graph = Graph(units, [Tensor("u0", ("u1", "u4"), 4)])
    problem = Problem(graph, 2, devices=(Device(2.0), Device(4.0)), transfer_s=ms)
    assert place(problem).largest_cost == pytest.approx(exhaustive(problem))
    assert set(place(problem).partitions) == {0, 1}


@pytest.mark.parametrize(
    ("graph", "arguments", "text"),
    [
        (
            chain([1, 1], parameters=100),
            {"partitions": 2, "devices": (Device(memory_bytes=399),) * 2},
            '"u0" alone takes 400 bytes, the largest device has 399; use more partitions, more memory',
        ),
        (
            chain([1] * 3, parameters=100),
            {"partitions": 2, "devices": (Device(memory_bytes=500),) * 2},
            'filled in program order, the devices have no room from "u2" on; use more partitions',
        ),
        (
            chain([1] * 3, parameters=100),
            {"partitions": 2, "devices": (Device(memory_bytes=800),) * 2, "fixed": {"u0": 1}},
            "fixed units and groups leave no room",
        ),
        (
            chain([1] * 4, parameters=100),
            {"partitions": 2, "chunks": 2, "devices": (Device(memory_bytes=500),) * 2},
            r"there is no placement with a unit in every segment that keeps within the memory limits \(the best",
        ),
        (chain([1]), {"partitions": 0}, "partitions is 0, it must be at least 1"),
        (chain([1]), {"partitions": 1, "chunks": 0}, "chunks is 0, it must be at least 1"),
        (chain([1]), {"partitions": 1, "layout": "w"}, 'layout is "w", it must be one of looped, v'),
        (
            chain([1]),
            {"partitions": 1, "memory_weight": 2.0},
            "memory_weight is 2.0, it must be a number from",
        ),
        (chain([1]), {"partitions": 1, "copies": -1}, "copies is -1, it must be at least 0"),
        (
            chain([1]),
            {"partitions": 2, "devices": (Device(),)},
            "devices has 1 entries, but there are 2 part",
        ),
        (
            chain([1]),
            {"partitions": 2, "in_flight": (1,)},
            "in_flight has 1 entries, but there are 2 segments",
        ),
        (chain([1]), {"partitions": 1, "in_flight": (-1,)}, "in_flight of segment 0 is -1"),
        (
            chain([1]),
            {"partitions": 1, "devices": (Device(0.0),)},
            "the speed of device 0 is 0.0, it must be",
        ),
        (
            chain([1]),
            {"partitions": 1, "devices": (Device(1, -1),)},
            "the memory of device 0 is -1, it must be",
        ),
        (chain([1]), {"partitions": 1, "fixed": {"x": 0}}, 'fixed names the unit "x", which is not in the'),
        (
            chain([1]),
            {"partitions": 1, "fixed": {"u0": 1}},
            'fixed puts "u0" on partition 1, but there are 1',
        ),
        (
            chain([1]),
            {"partitions": 1, "chunks": 2, "fixed": {"u0": 0}},
            "fixed says nothing about which of 2 chunks a unit goes to: leave fixed out, or give 1 chunk",
        ),
    ],
)
def test_faults(graph, arguments, text):
    with pytest.raises(PlacementError, match=text):
        place(Problem(graph, **arguments))


def test_unknown_algorithm():
    with pytest.raises(PlacementError, match='there is no algorithm "best", write one of exact, tree'):
        place(Problem(chain([1]), 1), "best")


def test_a_placement_that_breaks_rules_is_refused():
    graph = Graph([Unit("a", 1, 0, 100, 0, group="g"), Unit("b", 1, 0, 0, 0, group="g")])
    problem = Problem(graph, 2, devices=(Device(memory_bytes=399), Device()), fixed={"b": 0})
    with pytest.raises(PlacementError) as error:
        Placement(problem, (0, 1)).check()
    assert str(error.value) == (
        "partition 0 would take 400 bytes, its device has 399; "
        'the units of group "g" are on the partitions 0, 1; "b" is on partition 1, fixed puts it on 0'
    )


@given(st.integers(1, 6), st.integers(1, 20))
def test_one_chunk_of_1f1b(partitions, microbatches):
    held = in_flight(partitions, microbatches)
    assert held == tuple(min(microbatches, partitions - r) for r in range(partitions))
    assert in_flight(partitions, microbatches, schedule="gpipe") == (microbatches,) * partitions
