"""Waiting for the next batch."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.data.waiting import data_wait
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class DataWait(Rule):
    """Does training wait for the next batch?

    The measure is the share of a step, on the rank that waits most.
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
