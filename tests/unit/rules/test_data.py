"""Rules about the way of the data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Case, ask, check, gpu, sample
from weft.rules.rule import Status

WAITING = {"partitions": 2, "microbatches": 16, "data_s": 20.0}
BUSY = sample(cores=(1.0, 1.0), running=4, loaders=2, loaders_share=0.5, ours=1.0)


def half(rank: int, step: int) -> dict[str, object]:
    """The rank has its core for half of its work."""
    return {"work_s": 24.0, "cpu_s": 12.0, "preempted": 200}


CASES = {
    "DataWait": Case(
        Recorded(**WAITING), Status.CRITICAL, "for 28.2 %", Recorded(partitions=2, microbatches=16, data_s=5), None
    ),
    "PreprocessingCompetes": Case(
        Recorded(partitions=2, sample=BUSY, step_values=half), Status.CRITICAL, "training had none for 50.0 %",
        Recorded(partitions=2, sample=BUSY), Recorded(partitions=2, sample=sample()),
    ),
    "StorageThroughput": Case(
        Recorded(**WAITING, sample=sample(read_rate=10 << 20, io_wait=0.3)), Status.CRITICAL,
        "disks give 10 MiB/s, training needs 13.9 MiB/s",
        Recorded(**WAITING, sample=sample(loaders=1, loaders_share=0.5, read_rate=10 << 20)),
        Recorded(**WAITING), Status.NOT_ENOUGH_DATA,
    ),
    "Dataloader": Case(
        Recorded(**WAITING, sample=sample()), Status.WARNING, "0 processes load it on 2 cores",
        Recorded(partitions=2, sample=sample()), Recorded(**WAITING), Status.NOT_ENOUGH_DATA,
    ),
    "IOBottleneck": Case(
        Recorded(sample=sample(io_wait=0.6, devices=(gpu(0.0),))), Status.WARNING, "100.0 % of all moments",
        Recorded(sample=sample(io_wait=0.6, devices=(gpu(0.2),))), Recorded(), Status.NOT_ENOUGH_DATA,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_battery(name: str):
    check(name, CASES[name])


def test_a_thread_that_prepares_the_data_itself_is_no_slow_disk():
    """No loader beside it (`num_workers=0`): it reads, too, but is busy for most of the wait."""
    reads = replace(CASES["StorageThroughput"].fires, optimizer_s=4.0)
    assert ask("StorageThroughput", reads).status is Status.CRITICAL
    for cpu_s, status in ((4.0 + 15.0, Status.PASS), (4.0 + 5.0, Status.CRITICAL)):
        found = ask("StorageThroughput", replace(reads, step_values=lambda *_, s=cpu_s: {"between_cpu_s": s}))
        assert found.status is status, found


def test_a_loader_that_sleeps_is_no_slow_disk():
    assert ask("StorageThroughput", Recorded(**WAITING, sample=sample(loaders=1))).status is Status.PASS


def test_too_many_loaders_are_told_without_waiting():
    found = ask("Dataloader", Recorded(sample=sample(loaders=5)))
    assert (found.status, found.text) == (Status.WARNING, "5 processes load data on 2 cores")
    assert ask("Dataloader", Recorded(sample=sample(loaders=4))).status is Status.PASS


def test_processes_compete_only_where_threads_queue():
    made = Recorded(sample=sample(loaders=2, loaders_share=0.5, running=2), step_values=half)
    assert ask("PreprocessingCompetes", made).status is Status.PASS


def test_the_number_of_loaders_that_leaves_cores():
    found = ask("PreprocessingCompetes", Recorded(partitions=2, sample=BUSY, step_values=half))
    assert "num_workers=1" in found.advice[0]
    wide = sample(cores=(1.0,) * 8, running=20, loaders=16, loaders_share=0.5)
    found = ask("PreprocessingCompetes", Recorded(partitions=2, sample=wide, step_values=half))
    assert "num_workers=3" in found.advice[0]
