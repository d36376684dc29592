"""For each planted fault the verdict names it, and no other rule is critical."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Made, Values, sample, with_gaps
from tests.unit.rules.test_training import without_rank
from weft.analysis.analysis import Analysis
from weft.rules.rule import Status, judge
from weft.rules.table import RULES
from weft.rules.verdict import Verdict, verdict

NAN = float("nan")
TWO = Recorded(partitions=2, microbatches=16, steps=30)
FOUR = Recorded(partitions=4, microbatches=32, steps=30)
CLEAN = {f"clean {count}": Recorded(partitions=count, microbatches=32, sample=sample()) for count in (2, 3, 4)} | {
    "clean with copies": Recorded(partitions=2, replicas=2, microbatches=16, reduce_s=1),
    "clean and logging": replace(
        TWO,
        step_values=lambda rank, step: {
            "values": {"loss": 3 / step, "gradient_norm": 1 + 1 / step}, "memory_bytes": (200 + min(step, 5)) << 20
        },
    ),
}  # fmt: skip
TAKEN = sample(cores=(1.0, 1.0), running=5, loaders=2, loaders_share=0.5, ours=1.0)


def losing(rank: int, share: float, work_s: float, always: bool = False) -> Values:
    """A rank, or all, that have their cores for a share of their work."""

    def values(own: int, step: int) -> dict[str, object]:
        had = share if always or own == rank else 1.0
        return {"work_s": work_s, "cpu_s": had * work_s, "preempted": round(50 * (1 - had) * work_s)}

    return values


PLANTED: dict[str, tuple[str, Made]] = {
    "a slow module on the last partition": (
        "LastPartitionHeavy", replace(TWO, forward_s=[1, 1.5], backward_s=[2, 3])
    ),
    "the last of four takes 1.3 times as long": (
        "LastPartitionHeavy", Recorded(forward_s=[1, 1, 1, 1.3], backward_s=[2, 2, 2, 2.6])
    ),
    "a slow module on a middle partition": (
        "PartitionImbalance", replace(FOUR, forward_s=[1, 1, 1.6, 1], backward_s=[2, 2, 3.2, 2])
    ),
    "another process on a rank's core": (
        "StragglerRank", replace(TWO, slow={1: 2}, step_values=losing(1, 0.5, 96.0))
    ),
    "another process on a rank's core, as the host shows it": (
        "StragglerRank",
        replace(TWO, slow={1: 2}, sample=sample(others=0.5, running=6), step_values=losing(1, 0.5, 96.0)),
    ),
    "other processes on all cores": (
        "OtherProcesses",
        replace(with_gaps(TWO.run(), 0.3), samples=replace(
            TWO, sample=sample(others=0.6, running=8), steps=30).run().samples, steps=replace(
            TWO, step_values=losing(0, 0.5, 48.0, always=True)).run().steps),
    ),
    "another process on a core of a copy": ("StragglerRank", replace(TWO, replicas=2, slow={2: 2})),
    "a loader that sleeps": ("DataWait", replace(TWO, data_s=30, sample=sample())),
    "preprocessing that takes both cores": (
        "PreprocessingCompetes",
        replace(TWO, slow={0: 1.9, 1: 2.1}, data_s=8, sample=TAKEN, step_values=losing(0, 0.5, 90.0, always=True)),
    ),
    "a slow disk": (
        "StorageThroughput", replace(TWO, data_s=30, sample=sample(read_rate=20 << 20, io_wait=0.4, loaders=2))
    ),
    "too few microbatches": ("MicrobatchesTooFew", Recorded(partitions=4, microbatches=2)),
    "too many microbatches": ("MicrobatchesTooMany", with_gaps(replace(FOUR, microbatches=64).run(), 0.3)),
    "too many microbatches, beside other processes": (
        "MicrobatchesTooMany",
        replace(with_gaps(replace(FOUR, microbatches=64).run(), 0.6), samples=replace(
            FOUR, sample=sample(others=0.25, running=8)).run().samples, steps=replace(
            FOUR, step_values=losing(0, 0.76, 192.0, always=True)).run().steps),
    ),
    "a leak of 10 MB a step": (
        "MemoryLeak", replace(TWO, step_values=lambda rank, step: {"memory_bytes": (100 + 10 * step) * 1_000_000})
    ),
    "a step in 50 that takes five times as long": (
        "StepOutlier", Recorded(partitions=2, microbatches=16, steps=160, late={(50, 0): 5, (100, 0): 5, (150, 0): 5}),
    ),
    "pauses of the collector": (
        "CollectorPauses", replace(TWO, pauses=dict.fromkeys((8, 16, 24), ("collector", 40.0)))
    ),
    "saves that block": ("CheckpointStall", replace(TWO, pauses=dict.fromkeys((10, 20), ("checkpoint", 200.0)))),
    "a slow link": ("TransferExposed", replace(TWO, transfer_s=2.0)),
    "parts of weights that exchange much": ("TensorParallelExposed", replace(TWO, tensor=0.5)),
    "sums of gradients that take long": ("AllReduceExposed", replace(TWO, replicas=2, reduce_s=15)),
    "Python between steps": ("CPUBottleneck", replace(TWO, host_s=15)),
    "nan": (
        "LossNotFinite",
        replace(
            TWO,
            step_values=lambda _, step: {"values": {"loss": NAN if step > 12 else 1.0, "gradient_norm": NAN}},
        ),
    ),
    "a rank missing": ("RecordingIncomplete", without_rank(3)),
    "a file cut": ("RecordingIncomplete", replace(TWO.run(), warnings=("rank1.spans ends within a record",))),
}  # fmt: skip


def judged(made: Made) -> Verdict:
    return verdict(judge(RULES, Analysis(made.run() if isinstance(made, Recorded) else made)))


@pytest.mark.parametrize("fault", PLANTED)
def test_the_verdict_names_what_was_planted(fault: str):
    expected, made = PLANTED[fault]
    found = judged(made)
    assert found.finding is not None and found.finding.rule == expected, found.text
    others = [each for each in found.under if each.status in (Status.CRITICAL, Status.ERROR)]
    assert others == []


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_has_no_finding_above_info(name: str):
    found = judged(CLEAN[name])
    assert (found.status, found.finding) == (Status.PASS, None), found.text
    assert {each.status for each in found.under}.isdisjoint({Status.WARNING, Status.CRITICAL, Status.ERROR})
