"""Rules about ranks that do the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Case, ask, check
from weft.analysis.run import Unit
from weft.rules.replicas import distance
from weft.rules.rule import Status

ONE = Recorded(partitions=2, microbatches=16)
COPIES = Recorded(partitions=2, replicas=2, microbatches=16)


def unknown_times(rank: int, step: int) -> dict[str, object]:
    return {"cpu_s": 0.0}


CASES = {
    "StragglerRank": Case(
        Recorded(partitions=2, replicas=2, microbatches=16, slow={2: 1.5}), Status.CRITICAL,
        "rank 2 on node runs at 66.7 %",
        Recorded(partitions=2, replicas=2, microbatches=16, slow={2: 1.05}),
        Recorded(partitions=2, step_values=unknown_times), Status.NOT_ENOUGH_DATA,
    ),
    "AllReduceExposed": Case(
        Recorded(partitions=2, replicas=2, reduce_s=5), Status.CRITICAL, "15.6 %",
        Recorded(partitions=2, replicas=2, reduce_s=1), ONE,
    ),
    "SmallBatchNorm": Case(
        Recorded(settings={"batch_norm_samples": 8}), Status.WARNING, "over 8 samples",
        Recorded(settings={"batch_norm_samples": 16}), ONE,
    ),
    "LoadBalancing": Case(
        Recorded(partitions=2, replicas=2, microbatches=16, slow={2: 1.5}), Status.WARNING, "rank 0 works", COPIES, ONE
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_battery(name: str):
    check(name, CASES[name])


def test_only_where_there_are_copies_they_are_normalised_together():
    few = Recorded(settings={"batch_norm_samples": 8})
    assert not any("sync" in line for line in ask("SmallBatchNorm", few).advice)
    (line, *_) = ask("SmallBatchNorm", replace(few, replicas=2)).advice
    assert line.endswith("`weft.convert_sync_batchnorm(model)`")


def test_with_tensorflow_the_rule_says_why_it_is_silent():
    run = Recorded().run()
    run = replace(run, facts={0: replace(run.facts[0], versions={"TensorFlow": "2.20"})})
    found = ask("SmallBatchNorm", run)
    assert (found.status, "with TensorFlow" in found.text) == (Status.NOT_APPLICABLE, True)


def slowed(preempted: int, share: float) -> Recorded:
    """Rank 1 has its core for a share of its work, and loses the core so often."""

    def values(rank: int, step: int) -> dict[str, object]:
        return {"work_s": 48.0 / (share if rank == 1 else 1.0), "cpu_s": 48.0, "preempted": preempted * rank}

    return Recorded(partitions=2, microbatches=16, slow={1: 1 / share}, step_values=values)


def test_without_copies_lost_cores_tell():
    found = ask("StragglerRank", slowed(300, 0.5))
    assert (found.status, found.ranks) == (Status.CRITICAL, (1,))
    assert found.evidence["had its core"] == "50.0 % of its work"


@pytest.mark.parametrize(("second_s", "status"), [(1.0, Status.CRITICAL), (2.0, Status.PASS)])
def test_without_copies_the_costs_of_the_split_tell(second_s: float, status: Status):
    """Rank 1 takes twice as long and had its core half of the time: is that more than its units should take?"""
    units = (Unit("a", 0, 1.0, 2.0), Unit("b", 1, second_s, 2 * second_s))
    assert ask("StragglerRank", replace(slowed(0, 0.5), units=units)).status is status


def test_a_partition_that_is_heavy_is_no_straggler():
    heavy = Recorded(partitions=2, microbatches=16, forward_s=[1, 1.5], backward_s=[2, 3])
    assert ask("StragglerRank", heavy).status is Status.PASS


def test_a_rank_that_sleeps_lost_no_core():
    assert ask("StragglerRank", slowed(0, 0.5)).status is Status.PASS


def test_all_ranks_that_lose_their_cores_alike_are_no_stragglers():
    made = Recorded(partitions=2, step_values=lambda *_: {"work_s": 24.0, "cpu_s": 12.0, "preempted": 300})
    assert ask("StragglerRank", made).status is Status.PASS


def test_the_distance_counts_what_is_always_busy():
    """A histogram without its last bin would find these equal."""
    assert distance([1.0] * 10, [0.45] * 10) == pytest.approx(0.8326, abs=1e-4)
    assert distance([0.5, 1.0], [0.5, 1.0]) == 0.0
