"""Cores that wait for disks while GPUs stand still."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.hosts import Host, worst
from weft.rules.measures import mean, percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class IOBottleneck(Rule):
    """Do cores wait for disks while the GPUs have nothing to do?

    The share of moments, in per cent, in which all cores together wait for disks for more than `io_threshold` per cent
    of the time and the mean of all GPUs is busy below `gpu_threshold` per cent. Without GPUs the first alone counts.
    Each host is judged by itself.
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
