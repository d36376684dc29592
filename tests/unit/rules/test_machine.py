"""Rules about processors, GPUs and memory."""

from __future__ import annotations

import math

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Case, Values, ask, check, gpu, sample, with_samples
from weft.analysis.run import Device
from weft.rules.rule import Status

MB = 1_000_000


def memory(first: int, each: float, until: int = 1000) -> Values:
    """So many MB, and more with each step, up to a last one."""
    return lambda rank, step: {"memory_bytes": round((first + each * min(step, until)) * MB)}


HALF = {"work_s": 24.0, "cpu_s": 12.0}
"""Work with a core for half of its time."""
CASES = {
    "CPUBottleneck": Case(
        Recorded(microbatches=32, host_s=25), Status.WARNING, "19.2 % of a step",
        Recorded(microbatches=32, host_s=5), None,
    ),
    "LowGPUUtilization": Case(
        Recorded(sample=sample(devices=(gpu(0.3), gpu(0.9)))), Status.WARNING, "node gpu 0 is rarely busy",
        Recorded(sample=sample(devices=(gpu(0.9),))), Recorded(sample=sample()),
    ),
    "GPUMemoryIncrease": Case(
        with_samples(Recorded().run(), lambda n: sample(devices=(gpu(1, 0.2 + 0.01 * n),))), Status.WARNING,
        "node gpu 0 grew by", with_samples(Recorded().run(), lambda n: sample(devices=(gpu(1, min(0.5, 0.05 * n)),))),
        Recorded(sample=sample()),
    ),
    "BatchSize": Case(
        Recorded(sample=sample(devices=(gpu(0.3, 0.4),))), Status.WARNING, "below 50.0 %",
        Recorded(sample=sample(devices=(gpu(0.3, 0.9),))), Recorded(sample=sample()),
    ),
    "MemoryHeadroom": Case(
        Recorded(step_values=memory(1060, 0)), Status.CRITICAL, "98.7 %", Recorded(step_values=memory(900, 0)),
        Recorded(step_values=memory(0, 0)), Status.NOT_ENOUGH_DATA,
    ),
    "MemoryLeak": Case(
        Recorded(steps=30, step_values=memory(100, 10)), Status.CRITICAL, "takes 9.54 MiB more with every step",
        Recorded(steps=30, step_values=memory(100, 10, until=8)), Recorded(step_values=memory(100, 10)),
        Status.NOT_ENOUGH_DATA,
    ),
    "OtherProcesses": Case(
        Recorded(sample=sample(others=0.5, running=6), step_values=lambda *_: {**HALF, "preempted": 600}),
        Status.WARNING, "take 50.0 % of the cores, and training had none for 50.0 %",
        Recorded(sample=sample(others=0.5, running=6), step_values=lambda *_: HALF),
        Recorded(), Status.NOT_ENOUGH_DATA,
    ),
    "OverallSystemUsage": Case(
        Recorded(sample=sample(devices=(gpu(0.3),))), Status.INFO, "hosts that were measured: 1",
        None, Recorded(), Status.NOT_ENOUGH_DATA,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_battery(name: str):
    check(name, CASES[name])


def test_a_full_core_beside_idle_gpus():
    full = Recorded(microbatches=32, sample=sample(cores=(1.0, 0.0), devices=(gpu(0.05),)))
    assert ask("CPUBottleneck", full).status is Status.WARNING
    working = Recorded(microbatches=32, sample=sample(cores=(1.0, 0.0), devices=(gpu(0.0), gpu(1.0))))
    assert ask("CPUBottleneck", working).status is Status.PASS


def test_gpus_that_swing_and_gpus_that_never_run():
    swings = with_samples(Recorded().run(), lambda n: sample(devices=(gpu(float(n % 2)), gpu(0.0))))
    found = ask("LowGPUUtilization", swings)
    assert found.text == "node gpu 1 never ran; node gpu 0 is busy now and then"
    only = with_samples(Recorded().run(), lambda n: sample(devices=(gpu(float(n % 2)),)))
    assert ask("LowGPUUtilization", only).status is Status.INFO


def test_a_slow_leak_is_found_at_every_length():
    """Windows that overlap, as elsewhere, see a jump only."""
    run = Recorded(steps=200, partitions=2, microbatches=4).run()
    slow = with_samples(run, lambda n: sample(devices=(gpu(1, 0.2 + 0.0002 * n),)), count=4000)
    assert ask("GPUMemoryIncrease", slow).status is Status.WARNING


def test_a_leak_far_from_the_limit_is_a_warning():
    found = ask("MemoryLeak", Recorded(steps=30, step_values=memory(100, 0.3)))
    assert (found.status, found.evidence["full after"]) == (Status.WARNING, "3216 more steps")


def test_memory_that_grows_at_the_begin_only_is_no_leak():
    """For half of the run: the median over all pairs of steps grows, too."""
    begins = ask("MemoryLeak", Recorded(steps=30, step_values=memory(100, 10, until=14)))
    assert (begins.status, begins.text) == (Status.PASS, "the memory stays as it is")


def test_the_table_of_usage():
    found = ask("OverallSystemUsage", Recorded(sample=sample(read_rate=1 << 20)))
    assert found.evidence["node: cores"] == "max 50.0 %, p99 50.0 %, p95 50.0 %, p50 50.0 %"
    assert found.evidence["node: read"] == "max 1 MiB/s, p99 1 MiB/s, p95 1 MiB/s, p50 1 MiB/s"


def test_gpus_whose_memory_is_not_known_have_no_share_of_it():
    unknown = Device(0.3, 1 << 30, 0)
    assert ask("BatchSize", Recorded(sample=sample(devices=(unknown,)))).status is Status.NOT_ENOUGH_DATA
    usage = ask("OverallSystemUsage", Recorded(sample=sample(devices=(unknown,)))).evidence
    assert "node: GPU memory" not in usage and usage["node: GPUs"].startswith("max 30.0 %")
    both = ask("OverallSystemUsage", Recorded(sample=sample(devices=(unknown, gpu(math.nan, 0.4))))).evidence
    assert both["node: GPU memory"].startswith("max 40.0 %") and both["node: GPUs"].startswith("max 30.0 %")
