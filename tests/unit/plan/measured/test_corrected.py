"""What follows from steps that took other times than predicted."""

from __future__ import annotations

import pytest

from weft.config import Settings
from weft.plan.chosen import Chosen
from weft.plan.measured.corrected import correct, find_better
from weft.plan.option import Option, Placed
from weft.plan.search import search
from weft.simulate import FREE, StageCost

MIB = 2**20
EVEN = StageCost(1.0, 2.0, input_s=1.0, weight_s=1.0, activation_bytes=MIB, weight_bytes=MIB)
SETTINGS = Settings(partitions=2, microbatches=4, pipeline="auto")


def chosen_for(option: Option, stage: StageCost = EVEN) -> Chosen:
    (found,) = search(2, 4, lambda _: Placed((stage, stage)), FREE, tried=[option])
    return Chosen.of(found, FREE, "as asked")


def times_of(backward_s: float) -> dict[str, float]:
    """Both stages alike."""
    return {f"{stage}{kind}": s for stage in (0, 1) for kind, s in (("F", 1.0), ("B", backward_s))}


def test_times_of_kinds_that_ran_count_and_the_others_keep_their_proportion() -> None:
    cost = correct(EVEN, 1, {"1F": 3.0, "1I": 2.0, "1W": 4.0, "0F": 9.0})
    assert (cost.forward_s, cost.input_s, cost.weight_s, cost.backward_s) == (3.0, 2.0, 4.0, 6.0)
    assert cost.activation_bytes == MIB


def test_a_better_schedule_takes_over() -> None:
    better = find_better(chosen_for(Option("gpipe")), SETTINGS, times_of(2.0))
    assert better is not None and better.present_s == pytest.approx(15.0)
    assert better.chosen.schedule.rank_of_stage == (0, 1)
    assert better.chosen.step_s <= 0.95 * better.present_s
    assert find_better(better.chosen, SETTINGS, times_of(2.0)) is None


def test_none_takes_over_that_does_not_fit_the_memory() -> None:
    """With so little memory a rank holds one microbatch: all that is faster holds two."""
    present = chosen_for(Option("1f1b", active=1), StageCost(1.0, 2.0, activation_bytes=MIB))
    assert find_better(present, SETTINGS, times_of(2.0), memory_bytes=MIB) is None
    assert find_better(present, SETTINGS, times_of(2.0), memory_bytes=8 * MIB) is not None


@pytest.mark.parametrize("option", [Option("gpipe", recompute=True), Option("1f1b", active=1)])
def test_what_saves_memory_stays_or_is_compared(option: Option) -> None:
    found = find_better(chosen_for(option), SETTINGS, times_of(2.0), memory_bytes=8 * MIB)
    assert (found is None) == option.recompute
