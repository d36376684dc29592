"""Rules about the way of the data: loaders, preprocessing, storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.rules.measures import Host, core_time, mean, percent, queue, worst
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes, format_seconds


def data_wait(analysis: Analysis, ranks: Sequence[int]) -> tuple[float, float, int]:
    """The share of a usual step spent waiting for data, the seconds, and the one of the ranks on which it is most."""
    found = [
        (parts.data / parts.total, parts.data, rank)
        for rank, parts in analysis.typical.items()
        if parts.total > 0 and rank in ranks
    ]
    return max(found, key=lambda each: each[:2], default=(0.0, 0.0, ranks[0] if ranks else 0))


def own_work(analysis: Analysis, rank: int) -> float:
    """The share of the wait for data in which the rank's own thread worked: it prepared the data itself.

    What it did between steps counts, but for the optimizer.
    """
    steps = analysis.steps(rank)
    waited_s = sum(step.data_s for step in steps)
    worked_s = sum(step.between_cpu_s - step.optimizer_s for step in steps)
    return max(0.0, worked_s) / waited_s if waited_s else 0.0


@dataclass(frozen=True)
class DataWait(Rule):
    """Does training wait for the next batch?

    The share of a step, on the rank that waits most.
    """

    explains = ("PipelineBubble", "LowGPUUtilization", "Dataloader", "CPUBottleneck")

    warn: float = 0.10
    severe: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        share, seconds, rank = data_wait(analysis, analysis.ranks)
        workers = max(2, min(8, analysis.facts(rank).cores))
        advice = [
            f"load in processes beside the training: `DataLoader(..., num_workers={workers}, prefetch_factor=4)`"
        ]
        if not analysis.facts(rank).device.startswith("cpu"):
            advice.append("copy from pinned memory: `DataLoader(..., pin_memory=True)`")
        return self.graded(
            f"training waits for data for {percent(share)} of a step",
            (share, self.warn, self.severe),
            evidence={
                "waiting for data": f"{format_seconds(seconds)} a step",
                "share": percent(share),
                "rank": rank,
            },
            advice=[*advice, "do once what is the same each time: store what preprocessing gives"],
            gain=analysis.what_if.gain("no data wait"),
            ranks=[rank],
        )


@dataclass(frozen=True)
class Dataloader(Rule):
    """Are there too few or too many processes that load data, for the cores that there are?

    Processes that the ranks started, in per cent of the host's cores. Few of them count only where training waits for
    data for `least_wait` of a step.
    """

    min_threshold: float = 70.0
    max_threshold: float = 200.0
    least_wait: float = 0.10
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = [sample for sample in host.samples if sample.cores]
        if len(found) < self.least_samples:
            return self.abstain(f"{len(found)} measures of the host, it needs {self.least_samples}")
        loaders, cores = median(sample.loaders for sample in found), len(found[-1].cores)
        wait, _, rank = data_wait(analysis, host.ranks)
        evidence = {"loaders": round(loaders), "cores": cores, "waiting for data": percent(wait)}
        advice = [f"`DataLoader(..., num_workers={max(1, cores // len(host.ranks))})`"]
        if 100 * loaders > self.max_threshold * cores:
            return self.warning(
                f"{loaders:.0f} processes load data on {cores} cores", evidence=evidence, advice=advice,
                ranks=host.ranks,
            )  # fmt: skip
        if 100 * loaders < self.min_threshold * cores and wait > self.least_wait:
            return self.warning(
                f"training waits for data, and {loaders:.0f} processes load it on {cores} cores",
                evidence=evidence, advice=advice, ranks=[rank],
            )  # fmt: skip
        return self.passed("the loaders fit the cores", **evidence)


@dataclass(frozen=True)
class IOBottleneck(Rule):
    """Do cores wait for disks while the GPUs have nothing to do?

    The moments, in per cent, in which all cores together wait for disks for more than `io_threshold` per cent of the
    time, and the GPUs, if there are any, are busy below `gpu_threshold` per cent in the mean.
    """

    explains = ("DataWait", "PipelineBubble", "LowGPUUtilization")

    threshold: float = 50.0
    io_threshold: float = 50.0
    gpu_threshold: float = 10.0
    patience: int = 10

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, self._on)

    def _on(self, host: Host) -> Finding:
        """The finding about one host."""
        found = host.samples
        if len(found) < self.patience:
            return self.abstain(f"{len(found)} measures of the host, it needs {self.patience}")
        slow = [
            each
            for each in found
            if 100 * each.io_wait > self.io_threshold
            and (not each.devices or 100 * mean(gpu.busy for gpu in each.devices) < self.gpu_threshold)
        ]
        share = len(slow) / len(found)
        evidence = {"moments": len(found), "of them waiting for disks": percent(share)}
        if 100 * share <= self.threshold:
            return self.passed("cores rarely wait for disks alone", **evidence)
        return self.warning(
            f"in {percent(share)} of all moments cores waited for disks and GPUs for them",
            evidence=evidence,
            advice=[
                "read ahead: `DataLoader(..., num_workers=4, prefetch_factor=8)`",
                "store data in larger files",
            ],
            ranks=host.ranks,
        )


@dataclass(frozen=True)
class PreprocessingCompetes(Rule):
    """Do the processes that load and prepare data take the cores that training and sums of gradients need?

    Three things together show it: processes that the ranks started take at least `loaders` of all cores' time, more
    threads want to run than there are cores, and the ranks are busy for longer than the processor time they got.
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


@dataclass(frozen=True)
class StorageThroughput(Rule):
    """Does the file system give less than the training needs?

    It does where training waits for data, bytes come from a disk (at least `least_rate` a second, or cores wait for it
    for `io_wait` of the time), and neither loaders nor the ranks' own threads are busy. The rate that is needed is the
    rate that came, as if the step had no waiting.
    """

    explains = (
        "DataWait",
        "Dataloader",
        "IOBottleneck",
        "PipelineBubble",
        "LowGPUUtilization",
        "StepOutlier",
    )

    warn: float = 0.10
    severe: float = 0.20
    least_rate: int = 1 << 20
    io_wait: float = 0.10
    most_loader: float = 0.50
    least_samples: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        return worst(self, analysis, lambda host: self._on(host, analysis))

    def _on(self, host: Host, analysis: Analysis) -> Finding:
        """The finding about one host."""
        found = host.samples
        if len(found) < self.least_samples:
            return self.abstain(f"{len(found)} measures of the host, it needs {self.least_samples}")
        share, _, rank = data_wait(analysis, host.ranks)
        rate, waiting = mean(each.read_rate for each in found), mean(each.io_wait for each in found)
        cores = mean(len(each.cores) for each in found)
        started = max(1.0, mean(each.loaders for each in found))
        busy = mean(each.loaders_share for each in found) * cores / started
        own = own_work(analysis, rank)
        needed = rate / (1 - share) if share < 1 else rate
        evidence = {
            "read": f"{format_bytes(rate)}/s",
            "needed": f"{format_bytes(needed)}/s",
            "cores waiting for disks": percent(waiting),
            "a loader is busy": percent(busy),
            "the rank's own thread is busy in the wait": percent(own),
            "waiting for data": percent(share),
        }
        if rate < self.least_rate and waiting < self.io_wait:
            return self.passed("little is read from disks", **evidence)
        if busy > self.most_loader or own > self.most_loader:
            return self.passed("loaders are busy with more than reading", **evidence)
        return self.graded(
            f"disks give {format_bytes(rate)}/s, training needs {format_bytes(needed)}/s and waits {percent(share)} of "
            "a step",
            (share, self.warn, self.severe),
            evidence=evidence,
            advice=[
                "copy the data to a local disk or to memory (`/dev/shm`) before training",
                "store it in fewer and larger files, compressed or of smaller types",
                "read ahead: `DataLoader(..., num_workers=4, prefetch_factor=8)`",
            ],
            gain=analysis.what_if.gain("no data wait"),
            ranks=[rank],
        )
