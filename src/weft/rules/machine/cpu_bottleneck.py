"""Python that keeps devices waiting."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.run import Sample
from weft.rules.measures import mean, percent, share, while_training
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class CPUBottleneck(Rule):
    """Does the host's own time, Python and the script, keep the devices waiting?

    Two measures: the share of a step that is the host's own (`host_warn`, `host_severe`); and, with GPUs, the share
    of moments in per cent (`threshold`) in which the busiest core is above `cpu_threshold` while the GPUs' mean is
    below `gpu_threshold` per cent, on the host with most of them.
    """

    explains = ("LowGPUUtilization",)

    threshold: float = 50.0
    cpu_threshold: float = 90.0
    gpu_threshold: float = 10.0
    patience: int = 10
    host_warn: float = 0.10
    host_severe: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        host = share(analysis, lambda parts: parts.host)
        measured = [
            [each for each in own if each.devices and each.cores] for own in while_training(analysis).values()
        ]
        stuck = max(
            (mean(map(self._stuck, own)) for own in measured if len(own) >= self.patience), default=0.0
        )
        evidence = {"host": f"{percent(host)} of a step"}
        text = f"Python and the script take {percent(host)} of a step"
        if 100 * stuck > self.threshold:
            evidence["moments with a full core and idle GPUs"] = percent(stuck)
            text += f", and in {percent(stuck)} of all moments a core is full while GPUs are idle"
        return self.graded(
            text,
            (host, self.host_warn, self.host_severe),
            (100 * stuck, self.threshold, 100.0),
            evidence=evidence,
            advice=[
                "take out of the loop what waits for numbers each step: `.item()`, `print`, metrics",
                "make each call larger: fewer microbatches, or `torch.compile`",
            ],
            gain=analysis.what_if.gain("no host gaps"),
            ranks=analysis.ranks,
        )

    def _stuck(self, sample: Sample) -> bool:
        idle = 100 * mean(gpu.busy for gpu in sample.devices) < self.gpu_threshold
        return idle and 100 * max(sample.cores) > self.cpu_threshold
