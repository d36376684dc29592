"""Another split where ranks take longer than those that the split was made for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft import schedule
from weft.graph.model import Graph, Unit
from weft.plan.measured.rebalanced import Present, find_split

UNITS = tuple(Unit(f"blocks.{n}", 1.0, 2.0, 400, 64) for n in range(8))
PRESENT = Present(Graph(UNITS), (0,) * 4 + (1,) * 4, schedule.make("1f1b", 2, 8))
EVEN = [0.012, 0.012]


def steps(*busy: float, count: int = 5) -> list[list[float]]:
    return [[12e-3 * factor for factor in busy]] * count


def test_units_leave_a_rank_that_became_slower():
    found = find_split(PRESENT, steps(1.0, 2.0))
    assert found is not None
    assert found.stages in ((0,) * 5 + (1,) * 3, (0,) * 6 + (1,) * 2)
    assert found.speeds == pytest.approx((1.0, 0.5)) and found.late == (1.0, 2.0)
    assert found.step.step_s < 0.9 * found.present_s


def test_one_step_of_five_may_be_as_planned():
    assert find_split(PRESENT, [*steps(1.0, 2.0, count=4), EVEN]) is not None


def test_no_neighbour_of_the_split_is_better():
    found = find_split(PRESENT, steps(1.0, 3.0))
    assert found is not None
    others = [PRESENT.step(each, found.speeds).step_s for each in PRESENT.neighbours(found.stages)]
    assert found.step.step_s <= min(others)


def test_a_rank_that_became_quicker_gets_units_back():
    slow = replace(PRESENT, stages=(0,) * 6 + (1,) * 2, speeds=(1.0, 0.5))
    found = find_split(slow, [[18e-3, 6e-3]] * 5)
    assert found is not None and found.stages.count(1) in (3, 4) and found.late == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize(
    "busy",
    [
        steps(1.0, 1.05),
        [*steps(1.0, 2.0, count=3), EVEN, EVEN],
        [*steps(1.0, 2.0, count=2), *steps(2.0, 1.0, count=3)],
        steps(1.0, 0.0),
        steps(3.0, 3.0),
    ],
    ids=["noise", "two steps as planned", "once this one, once that", "no time", "all are slower"],
)
def test_the_split_stays(busy: list[list[float]]):
    assert find_split(PRESENT, busy) is None


def test_it_stays_where_nothing_is_gained():
    assert find_split(replace(PRESENT, stages=(0,) * 6 + (1,) * 2), [[18e-3, 12e-3]] * 5) is None


def test_a_group_stays_together_and_memory_is_enough():
    tied = tuple(replace(unit, group="tied" if n in (3, 4, 5) else None) for n, unit in enumerate(UNITS))
    present = replace(PRESENT, graph=Graph(tied), stages=(0,) * 3 + (1,) * 5)
    found = find_split(present, [[9e-3, 45e-3]] * 5)
    assert found is not None and len({*found.stages[3:6]}) == 1
    assert find_split(replace(PRESENT, memory_bytes=4 * 4 * 400 + 4 * 64), steps(1.0, 2.0)) is None


def test_stages_in_turns_and_halved_backward_passes():
    made = schedule.make("interleaved_1f1b", 2, 8, chunks=2)
    present = replace(PRESENT, schedule=made, stages=(0, 0, 1, 1, 2, 2, 3, 3))
    found = find_split(present, steps(1.0, 2.0))
    assert found is not None and sum(made.rank_of_stage[at] == 1 for at in found.stages) < 4
    found = find_split(replace(PRESENT, schedule=schedule.make("zb_h1", 2, 8)), steps(1.0, 2.0))
    assert found is not None
