"""Too few microbatches: the pipeline is filled and drained more than it is full."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import (
    enough_microbatches,
    ideal_bubble,
    least_samples,
    microbatches,
    partitions,
    percent,
)
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class MicrobatchesTooFew(Rule):
    """Is the mini-batch cut into so few microbatches that even a perfect split would stand still?

    The measure is the bubble of the schedule with equal partitions and messages that take no time: with 1F1B
    (p - 1) / (m + p - 1), for p partitions and m microbatches.
    """

    explains = ("PipelineBubble", "LowGPUUtilization")

    warn: float = 0.20
    severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        count, cut = partitions(analysis), microbatches(analysis)
        if count < 2:
            return self.not_applicable("the model is not split")
        ideal, enough = ideal_bubble(analysis, cut), self._enough(analysis)
        evidence = {"microbatches": cut, "partitions": count, "bubble of the schedule": percent(ideal)}
        if enough:
            evidence[f"with {enough} microbatches"] = percent(ideal_bubble(analysis, enough))
            advice = [f'cut it into more: `"microbatches": {enough}`']
        else:
            advice = [
                "give each step a larger mini-batch and cut it into more microbatches",
                'or take a schedule with fewer bubbles: `"pipeline": "zb_h1"`',
            ]
        if samples := least_samples(analysis):
            evidence["samples of a mini-batch"] = samples
        return self.graded(
            f"with {cut} microbatches for {count} partitions the schedule alone stands still for {percent(ideal)}",
            (ideal, self.warn, self.severe),
            evidence=evidence,
            advice=advice,
            gain=analysis.gain_of_microbatches(enough) if enough else None,
            ranks=analysis.ranks,
        )

    def _enough(self, analysis: Analysis) -> int | None:
        """The number that is best by a simulation with what was measured, else one that makes few bubbles."""
        change = analysis.what_if.change("microbatches")
        if change is not None and change.microbatches > microbatches(analysis):
            return change.microbatches
        return enough_microbatches(analysis, self.warn / 2) or enough_microbatches(analysis, self.warn)
