"""Several executors together: whatever the program and the delays, they end within the limit."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.runtime.toys import Rank, chain, run_all, tour
from weft import schedule
from weft.errors import PeerError
from weft.runtime.microbatch import Microbatch
from weft.schedule.order import Order

KINDS = st.sampled_from(["1f1b", "gpipe"])


def make(stages: int, seed: int, slowest_s: float) -> list[Rank]:
    ranks = Rank.make(stages)
    for rank in ranks:
        rank.dice, rank.slowest_s = random.Random(seed * 10 + rank.number), slowest_s
    return ranks


def orders(kind: str, stages: int, microbatches: int, active: int) -> list[Order]:
    limit = active if kind == "1f1b" else microbatches
    return [
        Order.of(actions, limit) for actions in schedule.make(kind, stages, microbatches, active=active).ranks
    ]


@given(KINDS, st.integers(2, 4), st.integers(1, 12), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=40)
def test_a_chain_comes_to_its_end_within_the_limit(
    kind: str, stages: int, microbatches: int, active: int, seed: int
):
    ranks = make(stages, seed, 3e-4)
    limits = orders(kind, stages, microbatches, active)
    results = run_all(ranks, lambda rank, index: chain(rank), limits, microbatches)
    top = stages - 1
    assert results == [[top + top - rank.number] * microbatches for rank in ranks]
    for rank, limit in zip(ranks, limits, strict=True):
        assert rank.peak <= limit.limit and not rank.held
        if kind == "1f1b":
            assert rank.peak <= active
        assert sorted(rank.did) == sorted(f"{phase}{i}" for phase in "FB" for i in range(microbatches))


@pytest.mark.parametrize("active", [1, 4, 6])
def test_64_microbatches_hold_only_the_active_ones(active: int):
    ranks = make(4, 1, 1e-4)
    results = run_all(ranks, lambda rank, index: chain(rank), orders("1f1b", 4, 64, active), 64)
    assert results == [[6 - rank.number] * 64 for rank in ranks]
    assert [rank.peak for rank in ranks] == [min(active, 4 - rank.number) for rank in ranks]
    for rank in ranks:
        assert len(rank.executor._workers) == 0, "closed"


@given(
    KINDS,
    st.integers(2, 3).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=2, max_size=9))
    ),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 99),
)
@settings(max_examples=60)
def test_partitions_visited_again_do_not_deadlock(
    kind: str, program: tuple[int, list[int]], microbatches: int, active: int, seed: int
):
    stages, visits = program
    ranks = make(stages, seed, 2e-4)
    limits = orders(kind, stages, microbatches, active)
    results = run_all(ranks, lambda rank, index: tour(rank, visits), limits, microbatches)
    assert results[visits[0]] == [2 * len(visits)] * microbatches, "every visit adds one each way"
    for rank, limit in zip(ranks, limits, strict=True):
        assert rank.peak <= limit.limit


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(0, 99)
)
@settings(max_examples=40)
def test_microbatches_may_run_different_programs(programs: list[list[int]], seed: int):
    """Early exits and skipped layers, which no list foresaw."""
    ranks = make(2, seed, 2e-4)
    count = len(programs)
    results = run_all(ranks, lambda rank, i: tour(rank, programs[i]), orders("1f1b", 2, count, 4), count)
    for index, visits in enumerate(programs):
        assert results[visits[0]][index] == 2 * len(visits)


def test_one_ranks_error_ends_all_and_names_it():
    ranks = make(3, 0, 0)
    unwound: list[tuple[int, int]] = []
    lock = threading.Lock()

    def body(rank: Rank, index: int):
        whole = chain(rank)

        def run(microbatch: Microbatch) -> int:
            try:
                if (rank.number, index) == (1, 2):
                    raise ValueError("in the middle")
                return whole(microbatch)
            except BaseException as error:
                with lock:
                    unwound.append((rank.number, index))
                raise error

        return run

    results = run_all(ranks, body, orders("1f1b", 3, 8, 5), 8)
    assert isinstance(results[1], ValueError)
    for number in (0, 2):
        assert isinstance(results[number], PeerError)
        assert str(results[number]) == "rank 1 failed: ValueError: in the middle"
    assert all(not rank.held for rank in ranks), "every finally block ran"
    assert {number for number, _ in unwound} == {0, 1, 2}
