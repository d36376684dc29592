"""Time in which ranks have nothing to run."""

from __future__ import annotations

from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.rules.measures import clocks_differ, ideal_bubble, mean, microbatches, partitions, percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds


@dataclass(frozen=True)
class PipelineBubble(Rule):
    """Do ranks stand still, and more than the schedule makes them?

    The bubble is the share of work, transfers and bubble together. It may be larger by `warn` than that of equal
    partitions and messages that take no time: a partition at 1.1 times the mean, which is no fault yet, makes up to
    0.09. A bubble that the schedule itself makes counts above `ideal_warn`.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.10
    severe: float = 0.20
    ideal_warn: float = 0.20
    ideal_severe: float = 0.35

    def evaluate(self, analysis: Analysis) -> Finding:
        count, cut = partitions(analysis), microbatches(analysis)
        if count < 2:
            return self.not_applicable("the model is not split")
        typical = list(analysis.typical.values())
        if error_s := clocks_differ(analysis):
            return self.abstain(
                f"the ranks' clocks may differ by {format_seconds(error_s)}, more than a tenth of a forward pass"
            )
        bubble, ideal = mean(map(_share, typical)), ideal_bubble(analysis, cut)
        change = analysis.what_if.change("schedule")
        waits = sorted(analysis.waits.items(), key=lambda pair: -pair[1])[:1]
        return self.graded(
            f"ranks have nothing to run for {percent(bubble)} of the pipeline's time; the schedule alone makes "
            f"{percent(ideal)}",
            (bubble - ideal, self.warn, self.severe),
            (ideal, self.ideal_warn, self.ideal_severe),
            evidence={
                "bubble": percent(bubble),
                "bubble of the schedule": percent(ideal),
                "warm-up": format_seconds(mean(each.warmup for each in typical)),
                "steady": format_seconds(mean(each.steady for each in typical)),
                "drain": format_seconds(mean(each.drain for each in typical)),
                "partitions": count,
                "microbatches": cut,
                **{f"rank {a} waits for rank {b}": format_seconds(seconds) for (a, b), seconds in waits},
            },
            advice=[f"take a schedule with fewer bubbles: `{change.line if change else _AUTO}`"],
            gain=analysis.what_if.gain("schedule"),
            ranks=analysis.ranks,
        )


_AUTO = '"pipeline": "auto"'


def _share(parts: Parts) -> float:
    inside = parts.work + parts.bubble + parts.transfer
    return parts.bubble / inside if inside > 0 else 0.0
