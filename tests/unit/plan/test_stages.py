"""From units to stages: sums, tensors that cross, visits to a rank, and refinement by simulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlacementError
from weft.graph import Graph, Tensor, Unit
from weft.partition import Device, Placement, Problem, place
from weft.plan.option import Option, Placed
from weft.plan.stages import (
    Placer,
    base_option,
    choices,
    held_by_stage,
    refined,
    simulated_s,
    stages_in,
    stages_of,
    step_s,
)
from weft.schedule import in_flight, make
from weft.simulate import Edge, Links, StageCost, simulate
from weft.topology.cluster import Link

LINKS = Links.uniform(Link.parse("1MB/s,1ms"))


def chain(times: list[float], **costs: int) -> Graph:
    known = {"parameter_bytes": 100, "activation_bytes": 10, "output_bytes": 8, **costs}
    return Graph(Unit(f"u{i}", time, 2 * time, **known) for i, time in enumerate(times))


def test_a_stage_is_the_sum_of_its_units():
    units = [
        Unit("a", 1.0, 2.0, 400, 64, 8, input_ms=1.5, weight_ms=0.25),
        Unit("b", 3.0, 4.0, 100, 32, 16),
        Unit("c", 5.0, 6.0, 10, 8, 4),
    ]
    found = stages_of(Graph(units), (0, 0, 1), (0, 1), speeds=(2.0, 1.0))
    assert found.stages == (
        StageCost(0.002, 0.003, (1.5 + 2) / 2e3, (0.25 + 2) / 2e3, 16, 0, 96, 96, 500),
        StageCost(0.005, 0.006, 0.003, 0.003, 0, 16, 8, 8, 10),
    )
    assert found.edges == () and found.rank_of_stage == () and found.placement is None


def test_tensors_that_skip_stages_are_edges():
    units = [Unit(name, 1.0, 2.0, 0, 0) for name in "abcd"]
    tensors = [
        Tensor("a", ("b", "c", "d"), 16),
        Tensor("a", ("d",), 4),
        Tensor("b", ("c",), 2),
        Tensor("c", ("d",), 1),
    ]
    found = stages_of(Graph(units, tensors), (0, 1, 2, 3), (0, 1, 2, 3))
    assert [stage.forward_bytes for stage in found.stages] == [16, 2, 1, 0]
    assert [stage.backward_bytes for stage in found.stages] == [0, 16, 2, 1]
    assert found.edges == (Edge(0, 2, 16), Edge(0, 3, 20))


def test_a_tensor_goes_to_a_rank_once():
    units = [Unit(name, 1.0, 2.0, 0, 0) for name in "abcd"]
    tensors = [Tensor("a", ("b", "c", "d"), 16)]
    assert stages_of(Graph(units, tensors), (0, 1, 2, 3), (0, 1, 0, 1)).edges == ()
    assert stages_of(Graph(units, tensors), (0, 1, 2, 3), (0, 1, 2, 1)).edges == (Edge(0, 2, 16),)
    assert stages_of(Graph(units, tensors), (0, 1, 2, 3), (0, 1, 2, 2)).edges == (Edge(0, 2, 16),)


def test_a_segment_without_units_is_a_stage_without_cost():
    found = stages_of(chain([1.0, 1.0]), (0, 2), (0, 1, 2))
    assert found.stages[1] == StageCost() and found.edges == (Edge(0, 2, 8),)


def test_a_late_unit_of_a_group_is_a_visit_more():
    found = stages_of(chain([1.0] * 6), (0, 0, 1, 2, 2, 0), (0, 1, 2))
    assert found.rank_of_stage == (0, 1, 2, 0)
    assert [stage.forward_s for stage in found.stages] == [0.002, 0.001, 0.002, 0.001]
    assert [stage.forward_bytes for stage in found.stages] == [8, 8, 8, 0]


def test_a_rank_without_units_has_an_empty_stage_at_the_end():
    found = stages_of(chain([1.0] * 4), (1, 0, 1, 0), (0, 1, 2))
    assert found.rank_of_stage == (1, 0, 1, 0, 2) and found.stages[-1] == StageCost()
    placement = Placement(Problem(chain([1.0] * 4), 3), (1, 0, 1, 0))
    assert simulated_s(placement, 1) == pytest.approx(12e-3)


def test_a_step_of_very_many_actions_is_estimated():
    placement = place(Problem(chain([1.0] * 4), 4))
    assert step_s(placement, 8) == simulated_s(placement, 8)
    assert step_s(placement, 100_000) == pytest.approx((3 + 100_000) * 3e-3)


def test_a_late_unit_of_a_group_joins_a_later_segment_of_its_rank():
    found = stages_of(chain([1.0] * 6), (0, 0, 1, 2, 2, 0), (0, 1, 2, 2, 1, 0))
    assert found.rank_of_stage == ()
    assert [stage.forward_s for stage in found.stages] == [0.002, 0.001, 0.002, 0.0, 0.0, 0.001]
    assert found.edges == (Edge(2, 5, 8),)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_is_lost(data):
    """Whatever the segments: times, parameters and activations add up, each rank keeps its own."""
    ranks = data.draw(st.integers(1, 4))
    layout = data.draw(
        st.sampled_from([range(ranks), [*range(ranks)] * 2, [*range(ranks), *reversed(range(ranks))]])
    )
    segments = data.draw(st.lists(st.integers(0, len(layout) - 1), min_size=1, max_size=8))
    graph = chain([float(1 + i) for i in range(len(segments))])
    found = stages_of(graph, segments, layout)
    where = found.rank_of_stage or layout
    for rank in range(ranks):
        own = [unit for unit, segment in zip(graph, segments, strict=True) if layout[segment] == rank]
        stages = [stage for stage, owner in zip(found.stages, where, strict=True) if owner == rank]
        assert sum(stage.backward_s for stage in stages) == pytest.approx(
            sum(unit.backward_ms for unit in own) / 1e3
        )
        assert sum(stage.parameter_bytes for stage in stages) == 100 * len(own)
        assert sum(stage.activation_bytes for stage in stages) == 10 * len(own)
    crossings = sum(layout[one] != layout[other] for one, other in zip(segments, segments[1:], strict=False))
    pairs = [(s, s + 1, stage.forward_bytes) for s, stage in enumerate(found.stages)] + list(found.edges)
    assert sum(size for s, t, size in pairs if size and where[s] != where[t]) == 8 * crossings


def test_the_simulated_step_of_a_placement():
    """1F1B over equal stages: (m + p - 1) times one; a slower device is slower."""
    placement = place(Problem(chain([1.0] * 4), 4))
    assert simulated_s(placement, 8) == pytest.approx(11 * 3e-3)
    slow = Placement(
        Problem(chain([1.0] * 4), 4, devices=(Device(), Device(), Device(), Device(0.5))), (0, 1, 2, 3)
    )
    assert simulated_s(slow, 8) == pytest.approx(8 * 6e-3 + 3 * 3e-3)
    assert simulated_s(placement, 8, LINKS) > simulated_s(placement, 8)
    assert simulated_s(placement, 8, option=Option("zb_h1")) < simulated_s(placement, 8)
    again = simulated_s(placement, 8, option=Option("1f1b", recompute=True))
    assert again == pytest.approx(11 * 4e-3)


def test_a_placement_with_a_visit_more_is_simulated_as_it_is():
    graph = Graph(
        [Unit("in", 1, 2, 0, 0, group="t"), Unit("mid", 2, 4, 0, 0), Unit("out", 1, 2, 0, 0, group="t")]
    )
    placement = place(Problem(graph, 2))
    assert placement.partitions == (0, 1, 0)
    assert simulated_s(placement, 8) >= 8 * 6e-3
    assert simulated_s(placement, 1) == pytest.approx(12e-3), "nothing overlaps"


def test_what_placements_are_judged_by():
    graph = chain([1.0] * 8)
    assert base_option(Problem(graph, 2)) == Option("1f1b")
    assert base_option(Problem(graph, 2, layout="v")) == Option("1f1b")
    assert base_option(Problem(graph, 2, chunks=3)) == Option("interleaved_1f1b", chunks=3)
    assert base_option(Problem(graph, 2, chunks=2, layout="v")) == Option("zbv")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.1, 9.0), min_size=6, max_size=12),
    st.integers(2, 3),
    st.integers(1, 8),
    st.sampled_from([Option("1f1b"), Option("zb_h1"), Option("list", like="1f1b", splits=True)]),
)
def test_refined_is_never_worse(times, ranks, microbatches, option):
    start = place(Problem(chain(times), ranks))
    better = refined(start, microbatches, LINKS, option, effort=2_000)
    assert simulated_s(better, microbatches, LINKS, option) <= simulated_s(start, microbatches, LINKS, option)


def test_refinement_looks_at_the_step_not_at_the_largest_stage():
    """Cut evenly, a slow link is crossed by a large tensor; one unit more on the left it is a small one."""
    units = [Unit(f"u{i}", 1.0, 2.0, 0, 0, 20_000 if i == 3 else 8) for i in range(8)]
    start = place(Problem(Graph(units), 2))
    assert start.segments == (0, 0, 0, 0, 1, 1, 1, 1)
    better = refined(start, 4, LINKS)
    assert better.segments in ((0, 0, 0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1, 1, 1))
    assert simulated_s(better, 4, LINKS) < simulated_s(start, 4, LINKS)
    assert refined(start, 4, LINKS, effort=1) is start, "too little effort to look at anything"


@pytest.mark.parametrize("layout", [(0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])
def test_units_are_placed_on_a_layout(layout):
    placed = Placer(chain([1.0] * 12), 3, 6)(layout)
    assert isinstance(placed, Placed) and len(placed.stages) == len(layout)
    assert [stage.forward_s for stage in placed.stages] == pytest.approx([12e-3 / len(layout)] * len(layout))


def test_layouts_that_are_none_and_too_few_units():
    placer = Placer(chain([1.0] * 4), 2, 4)
    text = r"^the stages are on the ranks 0, 1, 1: units are placed on stages that are dealt out in turn or as a V, 2 "
    with pytest.raises(PlacementError, match=text):
        placer((0, 1, 1))
    with pytest.raises(PlacementError, match="^4 units are not enough for 6 stages$"):
        placer((0, 1) * 3)


def test_units_are_placed_within_a_limit():
    """Evenly by time is 3 and 1 units; rank 0 holds two microbatches and has room for two units."""
    graph = chain([1.0, 1.0, 1.0, 3.0])
    placer = Placer(graph, 2, 4, memory_bytes=(840, 1300))
    assert [stage.parameter_bytes for stage in placer((0, 1)).stages] == [300, 100]
    placed = placer.within(Option("1f1b"))
    assert [stage.parameter_bytes for stage in placed.stages] == [200, 200]
    with pytest.raises(PlacementError, match="memory limits"):
        placer.within(Option("gpipe"))
    assert placer.within(Option("gpipe", recompute=True)).stages[0].parameter_bytes == 200


@pytest.mark.parametrize(
    "name", ["1f1b", "gpipe", "zb_h1", "zbv", "v_half", "interleaved_1f1b", "looped_bfs"]
)
def test_what_stages_hold(name):
    made = make(name, 3, 7)
    held = held_by_stage(made)
    for stage, rank in enumerate(made.rank_of_stage):
        own = [1 if other == stage else 0 for other in range(made.stages)]
        assert held[stage] == in_flight(made.ranks[rank], own)


def test_choices_fit_the_memory_and_are_what_the_simulation_says():
    graph = chain([1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 2.0, 1.0])
    placer = Placer(graph, 2, 4, LINKS, memory_bytes=(1700, 1700))
    found = choices(
        placer, [Option("1f1b"), Option("gpipe"), Option("zb_h1"), Option("gpipe", recompute=True)]
    )
    assert not found[0].fault and max(found[0].peak_bytes) <= 1700
    for one in found:
        if not one.fault:
            assert one.placed is not None and one.schedule is not None
            stages = stages_in(one.placed.placement).stages
            if not one.option.recompute:
                again = simulate(one.schedule.ranks, one.schedule.rank_of_stage, stages, LINKS)
                assert one.step_s == again.step_s
    assert [one.step_s for one in found if not one.fault] == sorted(
        one.step_s for one in found if not one.fault
    )


def test_tied_units_have_a_choice():
    graph = Graph(
        [Unit("in", 1, 2, 10, 4, 8, group="t"), *chain([1.0] * 4), Unit("out", 1, 2, 0, 4, 8, group="t")]
    )
    found = choices(Placer(graph, 2, 4, LINKS))
    assert not found[0].fault
    steps = {str(one.option): one for one in found}
    assert steps["1f1b"].fault == "" or "only list takes such stages" in steps["1f1b"].fault
    assert not steps["list on 1f1b"].fault
