"""Cuts that allow for the ranks that begin late."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from statistics import mean

import pytest

from weft.partition.chain.chain import split
from weft.plan.fill_drain_skew import PARTS, least_step, shift_cuts
from weft.schedule import make
from weft.simulate import FREE, StageCost, as_weft_runs, simulate


def loads_of(costs: list[float], stages: list[int], count: int) -> list[float]:
    return [
        sum(cost for cost, at in zip(costs, stages, strict=True) if at == stage) for stage in range(count)
    ]


def all_cuts(costs: list[float], count: int) -> list[list[float]]:
    """The loads of every choice of cuts that leaves no stage empty."""
    cuts = combinations(range(1, len(costs)), count - 1)
    return [[sum(costs[one:other]) for one, other in pairwise([0, *some, len(costs)])] for some in cuts]


@pytest.mark.parametrize("count", [2, 3, 8, 64])
@pytest.mark.parametrize("late", [1 / 64, 1 / 4, 1 / 2])
def test_the_bound_is_met_but_for_what_a_unit_costs(count: int, late: float):
    """Were units infinitely small, late * total / (1 - (1 - late)^count) would be the least; no cut is better."""
    draw = random.Random(count)
    for _ in range(20):
        costs = [draw.random() for _ in range(draw.randint(count, 50 * count))]
        found = least_step(loads_of(costs, shift_cuts(costs, split(costs, count), count, late), count), late)
        least = late * sum(costs) / (1 - (1 - late) ** count)
        assert least - 1e-9 <= least_step(loads_of(costs, split(costs, count), count), late)
        assert least - 1e-9 <= found
        if len(costs) > 20 * count:
            assert found <= least + (1 + late / 2) * max(costs)


def test_nothing_moves_where_no_rank_is_late():
    costs = [1.0, 5, 1, 1, 2]
    assert shift_cuts(costs, split(costs, 2), 2, 0.0) == split(costs, 2)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("loads", [(4.0, 4.0), (5.0, 3.5), (3.0, 5.0), (3.0, 4.0, 2.0), (2.0, 2.0, 3.0, 1.0)])
def test_a_simulated_step_takes_no_less(schedule: str, loads: tuple[float, ...]):
    """Loads are those of all 8 microbatches, a third of each forward. Exact where the last rank is the slowest."""
    stages = [StageCost(load / 24, load / 12) for load in loads]
    made = make(schedule, len(loads), 8)
    step_s = simulate(made.ranks, made.rank_of_stage, stages).step_s
    assert step_s >= least_step(loads, 1 / 8) - 1e-9
    if schedule == "1f1b" and loads[-1] == max(loads):
        assert step_s == pytest.approx(least_step(loads, 1 / 8))


@pytest.mark.parametrize(("count", "most"), [(2, 0.005), (3, 0.02), (4, 0.03)])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_the_best_of_the_parts_is_near_the_best_of_all_cuts(count: int, most: float, microbatches: int):
    """Simulated as weft runs 1F1B, with one more microbatch in flight; `most`: by how much it is longer on average."""
    draw = random.Random(10 * count + microbatches)
    made = make("1f1b", count, microbatches)

    def step_s(loads: list[float]) -> float:
        stages = [StageCost(forward * load, (1 - forward) * load) for load in loads]
        return as_weft_runs(made, stages, FREE, ahead=1).step_s

    longer, gained = [], []
    for _ in range(12):
        costs = [draw.uniform(0.5, 1.5) for _ in range(draw.randint(8, 12))]
        forward = draw.uniform(0.3, 0.5)
        even = split(costs, count)
        steps = [
            step_s(loads_of(costs, shift_cuts(costs, even, count, part / microbatches), count))
            for part in (0, *PARTS)
        ]
        best = min(map(step_s, all_cuts(costs, count)))
        assert steps[0] == pytest.approx(step_s(loads_of(costs, even, count)))
        longer.append(min(steps) / best - 1)
        gained.append(1 - min(steps) / steps[0])
    assert -1e-9 < mean(longer) < most
    assert mean(gained) > 0


def test_units_of_a_group_stay_and_no_stage_is_emptied():
    costs = [1.0, 1, 1, 1, 1, 3]
    assert shift_cuts(costs, [0, 0, 0, 0, 0, 1], 2, 0.5) == [0, 0, 0, 0, 0, 1]
    tied = [None, None, None, "one", None, "one"]
    assert shift_cuts(costs, [0, 0, 1, 1, 1, 1], 2, 0.5, tied) == [0, 0, 0, 1, 1, 1]
    assert shift_cuts([1.0, 0, 0], [0, 1, 2], 3, 0.5) == [0, 1, 2]
    assert shift_cuts([1.0, 1], [0, 2], 3, 0.5) == [0, 2], "fewer units than stages"


def test_units_that_cost_nothing_at_the_end_go_to_the_last_stage():
    assert shift_cuts([1.0, 1, 1, 0, 0], [0, 0, 1, 1, 1], 2, 0.5) == [0, 0, 1, 1, 1]
