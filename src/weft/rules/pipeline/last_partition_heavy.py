"""A last partition that takes longest: heads and losses are large and lie there."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import of_partition, own_work, partitions, percent
from weft.rules.pipeline.heavy import gain_of_lightening, lighten
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class LastPartitionHeavy(Rule):
    """Does the last partition, which has the head and the loss, take longer than every other one?

    The measure is by what share its work in a step is longer than that of the longest other partition, both without
    the time in which other processes had their cores.
    """

    explains = ("PartitionImbalance", "PipelineBubble", "LowGPUUtilization")

    warn: float = 0.10
    severe: float = 0.25

    def evaluate(self, analysis: Analysis) -> Finding:
        (work, evidence), last = own_work(analysis), partitions(analysis) - 1
        if last < 1:
            return self.not_applicable("the model is not split")
        if last not in work or len(work) < 2 or not any(work.values()):
            return self.abstain("the last partition's work, or that of all others, is not recorded")
        others = max(seconds for partition, seconds in work.items() if partition != last)
        more = work[last] / others - 1 if others else float("inf")
        return self.graded(
            f"the last partition works {percent(more)} longer than every other one" if more > 0 else "",
            (more, self.warn, self.severe),
            evidence=evidence,
            advice=[
                *lighten(analysis, last),
                "compute the loss in pieces, so that the head's output is never whole",
            ],
            gain=gain_of_lightening(analysis),
            ranks=of_partition(analysis)[last],
        )
