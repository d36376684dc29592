"""Cuts that allow for the ranks that begin late."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from weft.partition.chain import split
from weft.partition.late import allow, latest
from weft.schedule import make
from weft.simulate import StageCost, simulate


def loads_of(costs: list[float], stages: list[int], count: int) -> list[float]:
    return [
        sum(cost for cost, at in zip(costs, stages, strict=True) if at == stage) for stage in range(count)
    ]


def all_cuts(costs: list[float], count: int) -> list[list[float]]:
    """The loads of every choice of cuts that leaves no stage empty."""
    cuts = combinations(range(1, len(costs)), count - 1)
    return [[sum(costs[one:other]) for one, other in pairwise([0, *some, len(costs)])] for some in cuts]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_what_is_found_against_all_cuts(count: int):
    draw = random.Random(count)
    found_best = tries = 0
    for _ in range(200):
        costs = [draw.random() ** 2 for _ in range(draw.randint(count, 9))]
        late = 1 / draw.choice([2, 4, 8, 16])
        start = split(costs, count)
        found = latest(loads_of(costs, allow(costs, start, count, late), count), late)
        best = min(latest(loads, late) for loads in all_cuts(costs, count))
        assert best - 1e-9 <= found <= latest(loads_of(costs, start, count), late) + 1e-9
        found_best += found <= best + 1e-9
        tries += 1
    assert found_best == tries if count == 2 else found_best >= 0.9 * tries


@pytest.mark.parametrize("schedule", ["interleaved", "simple"])
@pytest.mark.parametrize("loads", [(4.0, 4.0), (5.0, 3.5), (3.0, 5.0), (3.0, 4.0, 2.0), (2.0, 2.0, 3.0, 1.0)])
def test_a_simulated_step_takes_no_less(schedule: str, loads: tuple[float, ...]):
    """Loads are those of all 8 microbatches, a third of each forward. Exact where the last rank is the slowest."""
    stages = [StageCost(load / 24, load / 12) for load in loads]
    made = make(schedule, len(loads), 8)
    step_s = simulate(made.ranks, made.rank_of_stage, stages).step_s
    assert step_s >= latest(loads, 1 / 8) - 1e-9
    if schedule == "interleaved" and loads[-1] == max(loads):
        assert step_s == pytest.approx(latest(loads, 1 / 8))


def test_units_of_a_group_stay_and_no_stage_is_emptied():
    costs = [1.0, 1, 1, 1, 1, 3]
    assert allow(costs, [0, 0, 0, 0, 0, 1], 2, 0.5) == [0, 0, 0, 0, 0, 1]
    tied = [None, None, None, "one", None, "one"]
    stages = allow(costs, [0, 0, 1, 1, 1, 1], 2, 0.5, tied)
    assert (stages[3], stages[5]) == (1, 1)
    assert stages == [0, 0, 0, 1, 1, 1]


def test_stages_in_another_order_are_left_alone():
    assert allow([1.0, 5, 1], [0, 1, 0], 2, 0.5) == [0, 1, 0]
