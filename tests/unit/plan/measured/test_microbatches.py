"""What is taken for stages of equal costs, by 1F1B."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.plan.measured.microbatches import (
    APART,
    MOST,
    NEAR,
    Judged,
    Line,
    Resident,
    explain,
    fewest,
    judge,
    numbers,
    quickest,
    to_measure,
)
from weft.schedule import make
from weft.simulate import StageCost, simulate

SAMPLES = 64


def taken(
    partitions: int, fixed_s: float, each_s: float, limit_bytes: float | None = None, sample_bytes: int = 0
) -> Judged | None:
    """What is taken for stages of equal costs, by 1F1B."""
    cost = Line(fixed_s, each_s)
    found = []
    for number in numbers(SAMPLES, partitions):
        stage_s = cost.at(SAMPLES / number) / partitions
        stage = StageCost(
            stage_s / 3, 2 * stage_s / 3, activation_bytes=sample_bytes * SAMPLES // number // partitions
        )
        made = make("1f1b", partitions, number)
        step = simulate(made.ranks, made.rank_of_stage, [stage] * partitions)
        found.append(judge(number, step.step_s, step.peak_bytes, limit_bytes))
    return quickest(found)


def best_by_formula(partitions: int, fixed_s: float, each_s: float) -> int:
    """The number with the least (m + p - 1) * cost(B / m) / p, the step of even stages without transfers."""

    def step_s(number: int) -> float:
        return (number + partitions - 1) * Line(fixed_s, each_s).at(SAMPLES / number) / partitions

    every = numbers(SAMPLES, partitions)
    least_s = min(map(step_s, every))
    return next(number for number in every if step_s(number) <= (1 + NEAR) * least_s)


def test_the_number_is_that_of_the_formula_for_even_stages():
    for partitions in (1, 2, 4, 8):
        for fixed_s in (0.0, 1e-4, 1e-3, 1e-2, 1e-1):
            best = taken(partitions, fixed_s, 1e-3)
            assert best is not None
            assert best.microbatches == best_by_formula(partitions, fixed_s, 1e-3), (partitions, fixed_s)


def test_dear_microbatches_make_few_of_them():
    assert [taken(4, fixed_s, 1e-3).microbatches for fixed_s in (0.0, 1e-3, 1e-1)] == [64, 16, 1]


def test_one_partition_has_one_microbatch_unless_memory_is_short():
    assert taken(1, 0.0, 1e-3).microbatches == 1
    assert taken(1, 1e-3, 1e-3, limit_bytes=16, sample_bytes=1).microbatches == 4


def test_what_needs_the_least_memory_runs_where_nothing_fits():
    best = taken(2, 1e-3, 1e-3, limit_bytes=0, sample_bytes=2)
    assert best.microbatches == SAMPLES and "a rank needs" in best.fault


def test_nothing_is_taken_where_nothing_can_be_placed():
    assert quickest([Judged(1, fault="no"), Judged(2, fault="no")]) is None


@given(st.integers(1, 5000), st.integers(1, 64), st.booleans())
def test_numbers_to_try(samples: int, partitions: int, uneven: bool):
    found = numbers(samples, partitions, uneven)
    assert found[0] == 1 and found[-1] <= min(samples, MOST * partitions)
    assert all(other >= APART * one for one, other in zip(found, found[1:], strict=False))
    assert uneven or all(samples % number == 0 for number in found)
    measured = to_measure(found, partitions)
    assert len(measured) == min(2, len(found)) and set(measured) <= set(found)


@given(st.dictionaries(st.integers(1, 1000), st.floats(0, 1e3), min_size=1, max_size=4))
def test_no_part_of_a_cost_is_negative(costs: dict[int, float]):
    line = Line.through(costs)
    assert line.fixed >= 0 and line.each >= 0


def test_the_words_name_what_fell_out():
    words = explain(Judged(2, 0.5), [Judged(1, fault="too large"), Judged(2, 0.5)], 6, Line(0.1, 0.1), [2, 3])
    assert "2 of 3 samples" in words and "(1: too large)" in words and "measured with 2 and 3" in words


def test_microbatches_fit_the_fullest_rank() -> None:
    """The others would do with fewer: one has room for all samples at once, one for half of them."""
    ranks = [Resident(8, 100.0, Line(0.0, 10.0), limit) for limit in (1000.0, 125.0, 150.0)]
    number, why, fits = fewest(ranks)
    assert (number, fits) == (4, True)
    assert "a rank takes 120 B of 125 B" in why
    assert [fewest([rank])[0] for rank in ranks] == [1, 4, 2]
