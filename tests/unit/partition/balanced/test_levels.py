"""The stages of any placement: no tensor goes back, few visits, one stage each where partitions follow each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.partition.balanced.graphs import graph_of, small_graphs
from weft.errors import PlacementError
from weft.partition.balanced.levels import levels_of, stages_of_placement


@st.composite
def placements(draw, most=12, partitions=4):
    graph = draw(small_graphs(most))
    where = draw(st.lists(st.integers(0, partitions - 1), min_size=len(graph), max_size=len(graph)))
    return graph, where


@settings(max_examples=300, deadline=None)
@given(placements())
def test_no_tensor_goes_back_and_units_stay_on_their_partition(drawn):
    graph, where = drawn
    stages, ranks = stages_of_placement(graph, where, 4)
    assert [ranks[stage] for stage in stages] == where
    assert sorted({*ranks}) == [0, 1, 2, 3]
    for source, targets, _ in graph.flows:
        assert all(stages[source] <= stages[target] for target in targets)
    visited = ranks[: max(stages) + 1]
    assert all(one != other for one, other in itertools.pairwise(visited))
    assert len(visited) <= len({*zip(levels_of(graph.users, where), where, strict=True)})


def fewest_visits(users, where):
    """The least number of visits, by looking at every order of visits."""
    before = {
        unit: {one for one, targets in enumerate(users) if unit in targets} for unit in range(len(where))
    }
    reached, visits = {frozenset()}, 0
    while not any(len(done) == len(where) for done in reached):
        following = set()
        for done in reached:
            for partition in {*where}:
                now = set(done)
                for unit in range(len(where)):
                    if where[unit] == partition and before[unit] <= now:
                        now.add(unit)
                following.add(frozenset(now))
        reached, visits = following, visits + 1
    return visits


@settings(max_examples=150, deadline=None)
@given(placements(most=8, partitions=3))
def test_hardly_more_visits_than_needed(drawn):
    """Never fewer than the least number, and at most one more on small graphs."""
    graph, where = drawn
    stages, _ = stages_of_placement(graph, where)
    least = fewest_visits(graph.users, where)
    assert least <= 1 + max(stages) <= least + 1


@settings(max_examples=200, deadline=None)
@given(placements())
def test_each_partition_is_one_stage_where_tensors_never_go_to_a_lower_one(drawn):
    graph, where = drawn
    where = sorted(where)
    _, ranks = stages_of_placement(graph, where)
    used = [*dict.fromkeys(where)]
    assert ranks[: len(used)] == tuple(used)


def test_the_order_of_the_program_does_not_matter():
    """Two branches, written in turn: one visit each."""
    graph = graph_of([(0, 2), (1, 3), (2, 4), (3, 5)], 6)
    stages, ranks = stages_of_placement(graph, [0, 1, 0, 1, 0, 1])
    assert (stages, ranks) == ((0, 1, 0, 1, 0, 1), (0, 1))


def test_a_unit_without_predecessors_makes_no_stage_of_its_own():
    """A mask on the last partition, where alone it is used; and one on the first, used at its second visit."""
    graph = graph_of([(1, 2), (2, 3), (0, 3)], 4)
    assert stages_of_placement(graph, [2, 0, 1, 2]) == ((2, 0, 1, 2), (0, 1, 2))
    graph = graph_of([(1, 2), (2, 3), (0, 3)], 4)
    assert stages_of_placement(graph, [0, 0, 1, 0]) == ((2, 0, 1, 2), (0, 1, 0))


def test_a_first_unit_that_another_partition_needs_has_a_stage_before_it():
    graph = graph_of([(0, 1), (1, 2)], 3)
    assert stages_of_placement(graph, [1, 0, 1]) == ((0, 1, 2), (1, 0, 1))


def test_an_idle_partition_has_an_empty_stage_at_the_end():
    assert stages_of_placement(graph_of([(0, 1)], 2), [0, 2], 4) == ((0, 1), (0, 2, 1, 3))


def test_a_placement_must_name_a_partition_for_each_unit():
    graph = graph_of([(0, 1)], 2)
    with pytest.raises(PlacementError, match="names 1 partitions, but there are 2 units: give one for each"):
        stages_of_placement(graph, [0])
    with pytest.raises(PlacementError, match='"u1" is on partition 2, but there are 2'):
        stages_of_placement(graph, [0, 2], 2)
