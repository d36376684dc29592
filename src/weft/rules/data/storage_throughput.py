"""A disk or file system that is slower than training needs."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.data.waiting import data_wait, own_work
from weft.rules.hosts import Host, worst
from weft.rules.measures import mean, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_bytes


@dataclass(frozen=True)
class StorageThroughput(Rule):
    """Does the file system give less than the training needs?

    Where training waits for data, bytes come from a disk (at least `least_rate` a second, or cores wait for it for
    `io_wait` of the time), and neither loaders nor the ranks' own threads are busy, the storage is what is slow. The
    rate that is needed is the rate that came, as if the step had no waiting. Each host is judged by itself.
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
