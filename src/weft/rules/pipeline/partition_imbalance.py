"""Partitions that take unequal time."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import mean, of_partition, own_work, partitions
from weft.rules.pipeline.heavy import gain_of_lightening, lighten
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class PartitionImbalance(Rule):
    """Does one partition take longer than the others, so that all wait for it?

    The measure is the work of the longest partition in a step, as a multiple of the mean, without the time in which
    other processes had its core. Of replicas the middle one counts, of two the faster.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 1.10
    severe: float = 1.25

    def evaluate(self, analysis: Analysis) -> Finding:
        work, evidence = own_work(analysis)
        if partitions(analysis) < 2:
            return self.not_applicable("the model is not split")
        if len(work) < 2 or not any(work.values()):
            return self.abstain("only one partition's work is recorded")
        heavy = max(work, key=lambda partition: work[partition])
        ratio = work[heavy] / mean(work.values())
        return self.graded(
            f"partition {heavy} works {ratio:.2f} times as long as the mean of all",
            (ratio, self.warn, self.severe),
            evidence=evidence,
            advice=lighten(analysis, heavy),
            gain=gain_of_lightening(analysis),
            ranks=of_partition(analysis)[heavy],
        )
