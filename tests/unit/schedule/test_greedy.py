"""List scheduling: legal under its memory limit for any costs, and near what is best."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.schedule.cases import TIMES, listed, stage_costs, whole
from tests.unit.schedule.clock import Times, run
from weft.errors import ScheduleError
from weft.schedule import ListCost, Schedule, greedy, in_flight, make
from weft.schedule.legal import check
from weft.schedule.schedule import Action


def play(schedule: Schedule, stages: list[ListCost]) -> Times:
    """On the tests' own clock."""

    def cost(action: Action) -> float:
        stage = stages[action.stage]
        whole_s = stage.backward_s if stage.whole_s is None else stage.whole_s
        times = {"F": stage.forward_s, "B": whole_s, "I": stage.backward_s, "W": stage.weight_s}
        return times[action.kind] or 0.0

    return run(schedule, cost, lambda stage: stages[stage].transfer_s)


def work(stage: ListCost) -> float:
    return stage.forward_s + max(stage.backward_s + (stage.weight_s or 0.0), stage.whole_s or 0.0)


def least_work(stage: ListCost) -> float:
    halves = stage.backward_s + (stage.weight_s or 0.0)
    return stage.forward_s + (halves if stage.whole_s is None else min(halves, stage.whole_s))


def chain(ranks: int, chunks: int = 1, split: bool = True) -> list[ListCost]:
    if split:
        return [ListCost(rank, 1.0, 1.0, 1.0, 1) for rank in range(ranks)] * chunks
    return [ListCost(rank, 1.0, 2.0, None, 1) for rank in range(ranks)] * chunks


@given(listed())
@settings(max_examples=200, deadline=None)
def test_any_stages_under_any_limit_are_legal(case: tuple[list[ListCost], int, list[int], Schedule]):
    stages, microbatches, memory, schedule = case
    check(schedule, activation_bytes=[s.activation_bytes for s in stages], memory_bytes=memory)
    assert schedule.microbatches == microbatches
    assert schedule.rank_of_stage == tuple(stage.rank for stage in stages)
    for stage, cost in enumerate(stages):
        kinds = {action.kind for row in schedule.ranks for action in row if action.stage == stage}
        if cost.whole_s is None:
            assert kinds == set("FB" if cost.weight_s is None else "FIW")
        else:
            assert kinds in (set("FB"), set("FIW"), set("FBIW"))


@given(listed())
@settings(max_examples=40, deadline=None)
def test_the_same_costs_give_the_same_schedule(case: tuple[list[ListCost], int, list[int], Schedule]):
    stages, microbatches, memory, schedule = case
    assert greedy(stages, microbatches, memory) == schedule


@given(stage_costs(), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_just_enough_memory_is_enough(stages: list[ListCost], microbatches: int):
    """And one byte less is not."""
    memory, sizes = whole(stages), [stage.activation_bytes for stage in stages]
    schedule = greedy(stages, microbatches, memory)
    for rank, actions in enumerate(schedule.ranks):
        assert in_flight(actions, sizes) == memory[rank]
    short = [size - 1 for size in memory]
    if max(memory) > 0:
        with pytest.raises(ScheduleError, match="bytes for the activations of one microbatch, and has"):
            greedy(stages, microbatches, [max(0, size) for size in short])


@given(stage_costs(), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_step_is_bounded(stages: list[ListCost], microbatches: int):
    """Without a limit some rank computes, or some tensor travels, at any time."""
    step = play(greedy(stages, microbatches), stages).step
    one = sum(map(work, stages)) + 2 * sum(
        a.transfer_s for a, b in zip(stages, stages[1:], strict=False) if a.rank != b.rank
    )
    busiest = max(
        sum(least_work(stage) for stage in stages if stage.rank == rank) for rank in {s.rank for s in stages}
    )
    assert busiest * microbatches <= step * (1 + 1e-9)
    assert step <= one * microbatches * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 9), (6, 12)])
def test_whole_backwards_in_the_memory_of_1f1b(p: int, m: int):
    stages = chain(p, split=False)
    schedule = greedy(stages, m, [p] * p)
    assert play(schedule, stages).step == 3 * (m + p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 9), (6, 12)])
def test_split_backwards(p: int, m: int):
    """In the memory of 1F1B no worse than ZB-H1; with twice that no bubble but the first way to the last rank."""
    stages = chain(p)
    assert play(greedy(stages, m, [p] * p), stages).step <= 3 * m + 2 * (p - 1)
    assert play(greedy(stages, m, [2 * p] * p), stages).step == 3 * m + p - 1


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 9, 2), (3, 9, 4)])
def test_several_chunks_with_split_backwards_fill_the_bubble(p: int, m: int, v: int):
    stages = chain(p, v)
    assert play(greedy(stages, m), stages).step == 3 * v * m + p - 1


@given(stage_costs(), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_worse_than_all_or_none_split(stages: list[ListCost], microbatches: int):
    """But for what the clock that candidates are compared by is off: there a rank may wait where nothing makes it."""
    stages = [replace(stage, whole_s=stage.whole_s or 1.0) for stage in stages if stage.weight_s is not None]
    stages = [replace(stage, rank=number % 2) for number, stage in enumerate(stages)]
    if stages:
        never = [replace(s, backward_s=s.whole_s, weight_s=None, whole_s=None) for s in stages]
        always = [replace(s, whole_s=None) for s in stages]
        step, *others = (play(greedy(costs, microbatches), costs).step for costs in (stages, never, always))
        assert step <= 1.05 * min(others) + 1e-9


def test_only_the_last_backward_passes_are_split():
    """Splitting takes a tenth more, so only those are split whose W fill the wait for the last gradients."""
    costs = [ListCost(rank, 1.0, 1.1, 1.1, 1, 0.0, 2.0) for rank in range(2)]
    schedule = greedy(costs, 8)
    assert [str(action) for action in schedule.ranks[1][-7:]] == "1B5 1F6 1I6 1F7 1I7 1W6 1W7".split()
    assert all(action.kind in "FB" for action in (*schedule.ranks[0], *schedule.ranks[1][:-7]))
    assert play(schedule, costs).step == pytest.approx(8 * 3 + 1 + 2 * 0.2)


@given(st.sampled_from(["zbv", "v_half", "v_min", "zb_h1"]), st.integers(2, 5))
@settings(max_examples=20, deadline=None)
def test_in_the_memory_of_a_pattern(name: str, p: int):
    """Found without knowing the pattern, at most a quarter longer."""
    peer = make(name, p, 4 * p)
    stages = [ListCost(rank, 1.0, 1.0, 1.0, 1) for rank in peer.rank_of_stage]
    limit = max(map(in_flight, peer.ranks))
    found = greedy(stages, 4 * p, [limit] * p)
    check(found, max_in_flight=limit)
    assert play(found, stages).step <= 1.25 * play(peer, stages).step


def test_patience():
    """W would hold up the gradient that comes 0.1 after it could begin."""
    stages = [ListCost(0, 1.0, 1.0, 1.0, 1, 0.05), ListCost(1, 1.0, 1.0, 1.0, 1)]
    schedule = greedy(stages, 4, [2, 2])
    assert play(schedule, stages).step <= play(make("zb_h1", 2, 4), stages).step


def test_policies_are_compared_on_some_microbatches_only():
    stages = chain(2, 2)
    schedule = greedy(stages, 70, [4, 4])
    check(schedule, max_in_flight=4)
    assert schedule.microbatches == 70


def orders(stage: int, microbatches: int) -> list[tuple[Action, ...]]:
    actions = [Action(stage, kind, i) for kind in "FB" for i in range(microbatches)]
    return [
        order
        for order in permutations(actions)
        if all(
            order.index(Action(stage, "F", i)) < order.index(Action(stage, "B", i))
            and (i == 0 or order.index(Action(stage, "F", i - 1)) < order.index(Action(stage, "F", i)))
            and (i == 0 or order.index(Action(stage, "B", i - 1)) < order.index(Action(stage, "B", i)))
            for i in range(microbatches)
        )
    ]


@given(st.tuples(TIMES, TIMES, TIMES), st.tuples(TIMES, TIMES, TIMES), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_against_the_best_of_all_orders(first, second, microbatches: int):
    """Two ranks, whole backwards, microbatches in order: never more than a third above the best."""
    stages = [ListCost(rank, f, b, None, 1, t) for rank, (f, b, t) in enumerate((first, second))]
    every = product(orders(0, microbatches), orders(1, microbatches))
    best = min(play(Schedule("any", ranks, (0, 1)), stages).step for ranks in every if alive(ranks))
    assert best - 1e-9 <= play(greedy(stages, microbatches), stages).step <= best * 4 / 3 + 1e-9


def alive(ranks: tuple[tuple[Action, ...], ...]) -> bool:
    try:
        check(Schedule("any", ranks, (0, 1)))
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    ("stages", "microbatches", "memory", "text"),
    [
        ([], 1, None, "^there are no stages, give the cost of at least one$"),
        ([ListCost(0, 1.0, 1.0)], 0, None, "^microbatches is 0, it must be at least 1$"),
        (
            [ListCost(0, -1.0, float("nan"), float("inf"))],
            1,
            None,
            "^forward_s of stage 0 is -1.0, it must be finite and not negative; backward_s of stage 0 is nan, .*; "
            "weight_s of stage 0 is inf",
        ),
        ([ListCost(-1, 1.0, 1.0)], 1, None, "^rank of stage 0 is -1, it must be finite and not negative"),
        ([ListCost(2, 1.0, 1.0)], 1, None, "^rank 0 has no stage, but rank 2 has; rank 1 has no stage"),
        ([ListCost(0, 1.0, 1.0)], 1, [1, 2], "^memory_bytes has 2 numbers, but there are 1 ranks$"),
        (
            [ListCost(0, 1.0, 1.0, None, 5), ListCost(1, 1.0, 1.0), ListCost(0, 1.0, 1.0, None, 7)],
            1,
            [11, 0],
            "^rank 0 needs 12 bytes for the activations of one microbatch, and has 11: make the microbatches "
            "smaller, or give the rank fewer stages$",
        ),
    ],
)
def test_faults(stages, microbatches, memory, text):
    with pytest.raises(ScheduleError, match=text):
        greedy(stages, microbatches, memory)
