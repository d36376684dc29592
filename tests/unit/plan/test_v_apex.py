"""A V whose turn is one stage: its ranks are even, and its sizes are the best of all as far as units allow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import PlacementError
from weft.graph import Graph, Unit
from weft.plan.option import Option
from weft.plan.search import search
from weft.plan.stages import Placer, stages_of
from weft.plan.v_apex import best_turn, tries, turns
from weft.simulate import FREE, Links, simulate
from weft.topology.cluster import Link

LINKS = Links.uniform(Link(0.05, 1000.0), overhead_s=0.02)


def layout(ranks: int) -> tuple[int, ...]:
    return Option("list", like="v").layout(ranks)


def loads(costs: list[float], stages: list[int], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for cost, stage in zip(costs, stages, strict=True):
        found[layout(ranks)[stage]] += cost
    return found


def graph_of(times: list[float], groups: dict[int, str] | None = None) -> Graph:
    return Graph(
        Unit(f"u{number}", time, 2 * time, 100, 10, 8, group=(groups or {}).get(number))
        for number, time in enumerate(times)
    )


def step_s(times: list[float], stages: list[int], ranks: int, microbatches: int, links: Links) -> float:
    placed = stages_of(graph_of(times), stages, layout(ranks))
    option = Option("list", like="v", splits=True)
    made = option.actions(ranks, microbatches, placed.stages, links, None, layout(ranks))
    return simulate(made.ranks, made.rank_of_stage, placed.stages, links).step_s


def test_ranks_there_and_back():
    assert [layout(ranks) for ranks in (1, 2, 4)] == [(0,), (0, 1, 0), (0, 1, 2, 3, 2, 1, 0)]


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=40), st.integers(2, 5))
def test_every_stage_has_units_in_program_order_and_ranks_are_even(costs: list[float], ranks: int):
    share = sum(costs) / ranks
    sizes = []
    for stages in turns(costs, ranks):
        assert sorted(set(stages)) == list(range(2 * ranks - 1))
        assert stages == sorted(stages)
        sizes.append(stages.count(0))
        first = loads(costs, stages, ranks)[0]
        if 2 * sizes[-1] < len(costs) / ranks and len(costs) > 8 * ranks:  # no stage is about to be empty
            assert abs(first - share) <= max(costs)
    assert sizes == sorted(set(sizes))


def test_equal_units_are_divided_equally():
    for stages in turns([1.0] * 24, ranks=3):
        assert loads([1.0] * 24, stages, 3) == [8.0, 8.0, 8.0]


def test_sizes_are_spread_where_only_some_are_tried():
    every = [stages.count(0) for stages in turns([1.0] * 40, ranks=2)]
    some = [stages.count(0) for stages in turns([1.0] * 40, ranks=2, most=4)]
    assert every == list(range(1, 20))
    assert some == [3, 8, 12, 17]
    assert len(list(turns([1.0] * 40, 2, most=1))) == 1 and tries(64, 1024) == 1


def test_a_unit_larger_than_a_rank_and_units_that_cost_nothing_have_a_turn():
    assert list(turns([9.0, 1.0, 1.0, 1.0], ranks=2)) == [[0, 1, 1, 2]]
    assert [sorted({*stages}) for stages in turns([0.0] * 4, ranks=2)] == [[0, 1, 2]]


def test_too_few_units_are_no_turn():
    assert list(turns([1.0, 1.0], ranks=2)) == []
    with pytest.raises(PlacementError, match="^the units are not enough for 3 stages, or those"):
        best_turn([], 2, 4, FREE)


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 1.5), min_size=8, max_size=12), st.integers(2, 6))
def test_the_best_turn_is_close_to_the_best_of_all_cuts(times: list[float], microbatches: int):
    """Brute force over two ranks: what is lost is at most what an uneven cut costs."""
    count = len(times)
    every = [
        [(unit >= one) + (unit >= other) for unit in range(count)]
        for one, other in itertools.combinations(range(1, count), 2)
    ]
    best = min(step_s(times, stages, 2, microbatches, LINKS) for stages in every)
    found = best_turn(
        (stages_of(graph_of(times), stages, layout(2)) for stages in turns(times, 2)), 2, microbatches, LINKS
    )
    option = Option("list", like="v", splits=True)
    (one,) = search(2, microbatches, lambda _: found, LINKS, tried=[option])
    assert one.schedule is not None
    taken = simulate(one.schedule.ranks, one.schedule.rank_of_stage, found.stages, LINKS).step_s
    assert taken <= 1.1 * best


def test_it_beats_one_stage_a_rank_with_few_microbatches():
    """The last rank begins after a small stage, not after half of the model."""
    placer = Placer(graph_of([1.0] * 16), ranks=2, microbatches=4)
    tried = [Option("list", like=like, splits=True) for like in ("1f1b", "v")]
    found = {one.option.like: one.step_s for one in search(2, 4, placer, FREE, tried=tried)}
    assert found["v"] < 0.95 * found["1f1b"]
    assert found["v"] >= 4 * 16 * 3 / 2 / 1e3, "no step is shorter than half of the work"


def test_units_of_a_group_lie_on_one_rank():
    placer = Placer(graph_of([1.0] * 12, {0: "tied", 11: "tied"}), ranks=2, microbatches=4)
    placed = placer(layout(2))
    assert placed.placement.partitions[0] == placed.placement.partitions[11] == 0
    apart = Placer(graph_of([1.0] * 12, {0: "tied", 6: "tied"}), ranks=2, microbatches=4)
    with pytest.raises(PlacementError, match="those that must lie together come to several ranks$"):
        apart(layout(2))
