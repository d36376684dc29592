"""Saves that stop the training."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import percent, share_of_all
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class CheckpointStall(Rule):
    """Does saving checkpoints stop the training?

    The measure is the share of the run without its first step, on the rank with most of it.
    """

    explains = ("StepOutlier", "PipelineBubble", "CPUBottleneck", "AllReduceExposed", "IOBottleneck")

    warn: float = 0.05
    severe: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        share, steps = share_of_all(analysis, lambda step: step.checkpoint_s)
        if not share:
            return self.not_applicable("no checkpoint was saved")
        return self.graded(
            f"saving checkpoints takes {percent(share)} of the time",
            (share, self.warn, self.severe),
            evidence={"share": percent(share), "saves": len(steps)},
            advice=[
                "write beside the training: `weft.save_checkpoint(..., asynchronous=True)`",
                "save less often",
            ],
            gain=share,
            ranks=analysis.ranks,
            steps=steps[:5],
        )
