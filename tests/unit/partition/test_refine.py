"""Local search by any score, against trying everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.oracle import legal, problems
from weft.errors import PlacementError
from weft.graph import Graph, Unit
from weft.partition import Device, Placement, Problem, place, refine
from weft.partition.placement import Mover


def weighted(placement):
    """A score whose optimum is not the balanced placement: later partitions count more."""
    return max((1 + 0.5 * index) * load.time_ms for index, load in enumerate(placement.loads))


@settings(max_examples=150, deadline=None)
@given(problem=problems(units=6, chunks=2))
def test_never_worse_than_its_start_and_within_the_rules(problem):
    try:
        start = place(problem)
    except PlacementError:
        return
    refined = refine(start, weighted)
    assert weighted(refined) <= weighted(start) * (1 + 1e-12)
    assert not refined.excess_bytes
    for units in problem.graph.groups.values():
        assert len({refined.partitions[unit] for unit in units}) == 1
    assert len(set(refined.segments)) >= len(set(start.segments))


@settings(max_examples=60, deadline=None)
@given(problem=problems(units=8, partitions=2, transfers=False, limits=False, groups=False))
def test_with_one_cut_it_finds_the_best(problem):
    """A time that grows to both sides of the best cut: every step downhill leads there."""
    refined = refine(place(problem), weighted)
    full = len(set(refined.segments)) == problem.segments
    best = min(weighted(p) for p in legal(problem) if (len(set(p.segments)) == problem.segments) == full)
    assert weighted(refined) == pytest.approx(best)


def test_balance_is_given_up_where_the_score_says_so():
    problem = Problem(Graph(Unit(f"u{i}", 1, 0, 0, 0) for i in range(12)), 2)
    refined = refine(place(problem), lambda placement: abs(placement.loads[0].time_ms - 2))
    assert refined.partitions == (0, 0, *[1] * 10)


def test_groups_are_moved():
    units = [Unit(f"u{i}", 1, 0, 0, 0, group="tied" if i in (0, 7) else None) for i in range(8)]
    problem = Problem(Graph(units), 2)
    start = place(problem)
    wanted = 1 - start.partitions[0]
    refined = refine(start, lambda placement: abs(placement.partitions[0] - wanted))
    assert refined.partitions[0] == refined.partitions[7] == wanted


def test_fixed_units_and_limits_stay():
    units = [Unit(f"u{i}", 1, 0, 1, 0) for i in range(8)]
    devices = (Device(), Device(memory_bytes=20))
    problem = Problem(Graph(units), 2, devices=devices, fixed={"u1": 0})
    start = place(problem)
    lighter_start = refine(start, lambda placement: placement.loads[0].time_ms)
    assert [load.memory_bytes for load in lighter_start.loads] == [12, 20]
    lighter_end = refine(start, lambda placement: placement.loads[1].time_ms)
    assert lighter_end.partitions == (*[0] * 7, 1)
    free = Problem(Graph(units), 2, fixed={"u1": 0})
    assert refine(place(free), lambda p: p.loads[0].time_ms).partitions == (0, 0, *[1] * 6)


@pytest.mark.parametrize("evaluations", [1, 2, 7])
def test_no_more_scores_than_allowed(evaluations):
    problem = Problem(Graph(Unit(f"u{i}", 1, 0, 0, 0) for i in range(40)), 4)
    scored = []
    refine(place(problem), lambda p: scored.append(p) or -len(scored), evaluations)
    assert len(scored) == evaluations


@settings(max_examples=150, deadline=None)
@given(problem=problems(units=6, limits=False), data=st.data())
def test_moving_units_counts_like_counting_again(problem, data):
    segment = st.integers(0, problem.segments - 1)
    n = len(problem.graph)
    start = Placement(problem, tuple(data.draw(st.lists(segment, min_size=n, max_size=n))))
    units = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    moved = Mover(problem).move(start, sorted(units), data.draw(segment))
    again = Placement(problem, moved.segments)
    for one, other in zip(moved.loads, again.loads, strict=True):
        assert vars(one) == pytest.approx(vars(other), abs=1e-9)


@pytest.mark.parametrize("score", [math.inf, math.nan])
def test_scores_that_are_no_numbers_change_nothing(score):
    problem = Problem(Graph(Unit(f"u{i}", 1, 0, 0, 0) for i in range(4)), 2)
    start = place(problem)
    assert refine(start, lambda placement: score).segments == start.segments


def test_faults():
    problem = Problem(Graph(Unit(f"u{i}", 1, 0, 0, 0) for i in range(3)), 2)
    with pytest.raises(PlacementError, match="evaluations is 0, it must be at least 1"):
        refine(place(problem), weighted, evaluations=0)
    with pytest.raises(
        PlacementError, match="the segments do not follow the program: start from a placement by"
    ):
        refine(Placement(problem, (0, 1, 0)), weighted)
