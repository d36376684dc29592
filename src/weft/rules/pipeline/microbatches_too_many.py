"""Too many microbatches: what each costs besides work outweighs the smaller bubble."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.pipeline.simulated import NEAR
from weft.rules.measures import (
    LEAST_LOST,
    host_inside_s,
    ideal_bubble,
    lost_core,
    mean,
    microbatches,
    partitions,
    percent,
)
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class MicrobatchesTooMany(Rule):
    """Is the mini-batch cut into so many microbatches that Python for each takes longer than it gains?

    The measure is the host's time within a step, as a share of it and of work. What a pass takes beyond what its units
    were measured to take is the host's as well; the time in which other processes had the core is not. It counts only
    where half as many microbatches would still leave the
    schedule's bubble below `bubble`, and save time by a simulation with what was measured.
    """

    explains = ("CPUBottleneck", "LowGPUUtilization", "PipelineBubble")

    warn: float = 0.15
    severe: float = 0.25
    bubble: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        cut = microbatches(analysis)
        if cut < 2:
            return self.not_applicable("the mini-batch is not cut")
        between = mean(host_inside_s(analysis).values())
        work = mean(each.work for each in analysis.typical.values())
        if not work:
            return self.abstain("no work is recorded")
        taken = mean(lost_core(analysis, rank) for rank in analysis.typical)
        own = (1.0 - taken) * (between + work)
        host = max(0.0, between + _inside_passes(analysis) - taken * (between + work))
        lost = host / own
        evidence: dict[str, object] = {
            "microbatches": cut,
            "host for each": format_seconds(host / cut),
            "work for each": format_seconds(work / cut),
        }
        if taken >= LEAST_LOST:
            evidence["without its core"] = f"{percent(taken)} of the work"
        fewer = cut // 2
        if ideal_bubble(analysis, fewer) > self.bubble:
            return self.passed(f"with {fewer} the bubble of the schedule would be too large", **evidence)
        fewer = self._best(analysis, fewer)
        return self.graded(
            f"of each microbatch {percent(lost)} is Python, in passes and between them",
            (lost, self.warn, self.severe),
            evidence=evidence,
            advice=[f'cut it into fewer: `"microbatches": {fewer}`'],
            gain=analysis.gain_of_microbatches(fewer)
            if partitions(analysis) > 1
            else host * (1 - fewer / cut) / analysis.step_s,
            ranks=analysis.ranks,
        )

    def _best(self, analysis: Analysis, fewer: int) -> int:
        """The number that the report's table of changes has, where the schedule's bubble is small with it.

        Else the largest of so many, half of them, a quarter ... that saves `NEAR` of the most, by simulation.
        """
        if partitions(analysis) == 1:
            return fewer
        change = analysis.what_if.change("microbatches")
        if (
            change
            and change.microbatches <= fewer
            and ideal_bubble(analysis, change.microbatches) <= self.bubble
        ):
            return change.microbatches
        gains, number = {fewer: 0.0}, fewer
        while number >= 1 and ideal_bubble(analysis, number) <= self.bubble:
            gains[number] = max(0.0, analysis.gain_of_microbatches(number) or 0.0)
            number //= 2
        most = max(gains.values())
        return max(number for number, gain in gains.items() if gain >= NEAR * most)


def _inside_passes(analysis: Analysis) -> float:
    """Seconds of a rank's step that passes take beyond their units."""
    if analysis.simulated is None:
        return 0.0
    stages = analysis.simulated.stages
    return sum(stages.inside_s) * stages.microbatches * analysis.simulated.chunks
