"""Too many microbatches: what each costs besides work outweighs the smaller bubble."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.measures import host_inside_s, ideal_bubble, mean, microbatches, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class MicrobatchesTooMany(Rule):
    """Is the mini-batch cut into so many microbatches that Python between them takes longer than it gains?

    The measure is the host's time within a step, as a share of it and of work. It counts only where half as many
    microbatches would still leave the schedule's bubble below `bubble`.
    """

    explains = ("CPUBottleneck", "LowGPUUtilization", "PipelineBubble")

    warn: float = 0.10
    severe: float = 0.25
    bubble: float = 0.20

    def evaluate(self, analysis: Analysis) -> Finding:
        cut = microbatches(analysis)
        if cut < 2:
            return self.not_applicable("the mini-batch is not cut")
        host = mean(host_inside_s(analysis).values())
        work = mean(each.work for each in analysis.typical.values())
        if not work:
            return self.abstain("no work is recorded")
        lost = host / (host + work)
        evidence = {
            "microbatches": cut,
            "host for each": format_seconds(host / cut),
            "work for each": format_seconds(work / cut),
        }
        fewer = cut // 2
        if ideal_bubble(analysis, fewer) > self.bubble:
            return self.passed(f"with {fewer} the bubble of the schedule would be too large", **evidence)
        return self.graded(
            f"of each microbatch {percent(lost)} is Python between passes",
            (lost, self.warn, self.severe),
            evidence=evidence,
            advice=[f'cut it into fewer: `"microbatches": {fewer}`'],
            gain=host / 2 / analysis.step_s if analysis.step_s else None,
            ranks=analysis.ranks,
        )
