"""Measures that rules share, and rules that judge each host by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import ask, gpu, sample, with_gaps
from tests.unit.rules.test_data import BUSY, WAITING, half
from tests.unit.rules.test_machine import HALF
from weft.analysis.analysis import Analysis
from weft.analysis.run import Run, Sample
from weft.rules.measures import core_time, hosts
from weft.rules.rule import Status

HALF_BUSY = Recorded(partitions=2, replicas=2, reduce_s=40.0, step_values=lambda rank, step: {"cpu_s": 12.0})
"""24 seconds of work, 12 of them with a core; then a sum of gradients that is waited for."""


def test_waits_need_no_core():
    analysis = Analysis(HALF_BUSY.run())
    assert [core_time(analysis, rank) for rank in analysis.ranks] == pytest.approx([0.5] * 4)


def test_python_between_passes_needs_the_core_as_well():
    """Half of the work is Python now: with 12 seconds the passes alone would have had their core all the time."""
    assert core_time(Analysis(with_gaps(HALF_BUSY.run(), 0.5)), 0) == pytest.approx(0.5)


@pytest.mark.parametrize("other", [{"device": "cuda:0"}, {"versions": {"TensorFlow": "2.20"}}])
def test_the_time_of_all_threads_says_nothing_of_the_one_that_trains(other: dict[str, object]):
    run = HALF_BUSY.run()
    run = replace(run, facts={rank: replace(each, **other) for rank, each in run.facts.items()})  # type: ignore[arg-type]
    assert core_time(Analysis(run), 0) is None


QUIET = sample(cores=(0.1, 0.1), loaders=2, devices=(gpu(0.9),))


def on_four_hosts(run: Run, third: Sample) -> Run:
    """Each host runs an equal part of the ranks, and is quiet but for the third one."""
    each = len(run.ranks) // 4
    facts = {rank: replace(own, host=f"node{rank // each}") for rank, own in run.facts.items()}
    moments = [number / 2 for number in range(int(2 * run.timeline.end_s))]
    samples = {
        f"node{host}": tuple(replace(third if host == 2 else QUIET, at_s=at_s) for at_s in moments)
        for host in range(4)
    }
    return replace(run, facts=facts, samples=samples)


LOSING = {**HALF, "preempted": 600}
CASES = {
    "PreprocessingCompetes": (Recorded(4, 8, step_values=half).run(), BUSY, Status.CRITICAL, (2,)),
    "OtherProcesses": (
        Recorded(4, 8, step_values=lambda *_: LOSING).run(), sample(others=0.5, running=6), Status.WARNING, (2,),
    ),
    "StorageThroughput": (
        Recorded(1, 1, 8, data_s=2.0).run(), sample(read_rate=10 << 20, io_wait=0.3), Status.CRITICAL, (4,)
    ),
    "Dataloader": (Recorded(1, 1, 8, data_s=2.0).run(), sample(loaders=5), Status.WARNING, (4, 5)),
    "IOBottleneck": (Recorded(4, 8).run(), sample(io_wait=0.6, devices=(gpu(0.0),)), Status.WARNING, (2,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_host_that_is_overloaded_is_named(name: str):
    run, third, status, ranks = CASES[name]
    found = ask(name, on_four_hosts(run, third))
    assert (found.status, found.ranks) == (status, ranks), found
    assert found.text.endswith(", on node2")
    assert ask(name, on_four_hosts(run, QUIET)).status is Status.PASS


def test_one_host_with_full_cores_and_idle_gpus_is_enough():
    run = with_gaps(Recorded(4, 32, steps=20).run(), 0.05)
    stuck = sample(cores=(0.99, 0.1), devices=(gpu(0.0),))
    found = ask("CPUBottleneck", on_four_hosts(run, stuck))
    assert "in 100.0 % of all moments a core is full" in found.text


def test_a_single_host_runs_all_ranks_whatever_it_is_called():
    made = Recorded(**WAITING, sample=sample()).run()
    run = replace(made, samples={"other": made.samples["node"]})
    (host,) = hosts(Analysis(run))
    assert (host.name, host.ranks) == ("other", (0, 1))
    assert hosts(Analysis(replace(run, facts={}, steps={}, timeline=type(run.timeline)()))) == []
