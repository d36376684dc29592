"""Python's garbage collector."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import percent, share_of_all
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class CollectorPauses(Rule):
    """Does Python's garbage collector stop the training?

    The measure is its share of the run without its first step, on the rank with most of it. A pause is one that takes
    `least` of a step; a single one in a run is no fault.
    """

    explains = ("StepOutlier", "PipelineBubble", "CPUBottleneck", "AllReduceExposed")

    warn: float = 0.01
    severe: float = 0.03
    least: float = 0.05

    def evaluate(self, analysis: Analysis) -> Finding:
        share, steps = share_of_all(analysis, lambda step: step.collector_s, self.least)
        if len(steps) < 2:
            return self.passed(f"{len(steps)} pauses of the garbage collector", share=percent(share))
        return self.graded(
            f"the garbage collector takes {percent(share)} of the time",
            (share, self.warn, self.severe),
            evidence={"share": percent(share), "steps with a pause": len(steps)},
            advice=[
                "collect on all ranks at the same time: `gc.disable()`, and `gc.collect()` every 1000 steps",
                "leave out what stays anyhow: `gc.freeze()` after the model is made",
            ],
            gain=share,
            ranks=analysis.ranks,
            steps=steps[:5],
        )
