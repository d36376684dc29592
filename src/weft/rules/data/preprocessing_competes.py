"""Data loading that takes the cores that training needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.hosts import Host, worst
from weft.rules.measures import core_time, mean, percent, queue
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class PreprocessingCompetes(Rule):
    """Do the processes that load and prepare data take the cores that training and sums of gradients need?

    Three things together tell it: processes that the ranks started take at least `loaders` of all cores' time, more
    threads want to run than there are cores, and the ranks are busy for longer than the processor time they got. Each
    host is judged by itself.
    """

    explains = (
        "DataWait", "Dataloader", "StragglerRank", "CPUBottleneck", "PartitionImbalance", "LastPartitionHeavy",
        "PipelineBubble", "AllReduceExposed", "LowGPUUtilization", "LoadBalancing", "MicrobatchesTooMany",
        "TransferExposed", "StepOutlier", "OtherProcesses",
    )  # fmt: skip

    warn: float = 0.15
    severe: float = 0.30
    loaders: float = 0.20
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = host.samples
        had = {rank: share for rank in host.ranks if (share := core_time(analysis, rank)) is not None}
        if len(found) < self.least_samples:
            return self.abstain(f"{len(found)} measures of the host, it needs {self.least_samples}")
        if not any(sample.loaders for sample in found):
            return self.not_applicable("the ranks have no processes beside them")
        if not had:
            return self.abstain("it is not known how much processor time the work got")
        taken = mean(sample.loaders_share for sample in found)
        waiting = mean(map(queue, found))
        lost = 1 - mean(had.values())
        evidence = {
            "loaders take": f"{percent(taken)} of all cores",
            "threads that want to run": f"{waiting:.1f} a core",
            "work without its core": percent(lost),
            "processes beside the ranks": round(mean(sample.loaders for sample in found)),
        }
        if taken < self.loaders or waiting <= 1.0:
            return self.passed("the data's processes leave cores for the training", **evidence)
        return self.graded(
            f"data loading takes {percent(taken)} of the cores, and training had none for {percent(lost)} of its work",
            (lost, self.warn, self.severe),
            evidence=evidence,
            advice=[
                f"start fewer of them: `DataLoader(..., num_workers={_fewer(host)})`",
                "prepare the data once and store it, or prepare it on other machines",
                "give ranks and loaders cores of their own (`taskset`), or let loaders be polite: `os.nice(10)` in "
                "`worker_init_fn`",
            ],
            gain=_gain(analysis, had),
            ranks=sorted(had),
        )


def _fewer(host: Host) -> int:
    """Loaders of a rank for which cores are left besides one for each rank of the host."""
    cores = max(len(sample.cores) for sample in host.samples)
    return max(1, (cores - len(host.ranks)) // len(host.ranks))


def _gain(analysis: Analysis, had: Mapping[int, float]) -> float | None:
    """The share of a step that is saved if the slowest rank's work takes no longer than the processor time that it
    got."""
    saved = [(1 - had[rank]) * parts.work for rank, parts in analysis.typical.items() if rank in had]
    return min(1.0, max(saved) / analysis.step_s) if saved and analysis.step_s else None
