"""Steps that take much longer than the others."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.analysis.series import outliers
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule
from weft.units import format_seconds
from weft.untrusted import listed

FIRST = 2
"""So many steps at the begin trace and split, or wait for other ranks that do."""


@dataclass(frozen=True)
class StepOutlier(Rule):
    """Do some steps take much longer than the others?

    A step's time goes to the begin of the next one. An outlier is above the median by `stddev` robust standard
    deviations (1.4826 times the median distance), and by `least` of the median. It takes more than `n_outliers` of
    them, and `warn` of the time lost in them. The first two steps, in which ranks trace, do not count.
    """

    explains = ("PipelineBubble",)

    stddev: float = 4.0
    n_outliers: int = 1
    least: float = 0.5
    warn: float = 0.01
    severe: float = 0.15
    patience: int = 20

    def evaluate(self, analysis: Analysis) -> Finding:
        taken = _step_times(analysis)
        if len(taken) < self.patience:
            return self.abstain(f"{len(taken)} steps, it needs {self.patience}")
        middle, numbers = median(taken.values()), list(taken)
        far = {
            numbers[place]: taken[numbers[place]]
            for place in outliers(list(taken.values()), 1.4826 * self.stddev, self.least)
        }
        lost = sum(seconds - middle for seconds in far.values()) / sum(taken.values())
        evidence = {
            "median": format_seconds(middle), "outliers": len(far), "of steps": len(taken),
            "longest": format_seconds(max(taken.values())),
        }  # fmt: skip
        if len(far) <= self.n_outliers:
            return self.passed("the steps take alike", **evidence)
        worst = sorted(far, key=lambda step: -far[step])[:5]
        if what := _what_grew(analysis, worst):
            evidence["what takes longer in them"] = what
        return self.graded(
            f"{len(far)} of {len(taken)} steps take {fmean(far.values()) / middle:.1f} times as long as the median: "
            f"steps {listed(sorted(far), most=4)}",
            (lost, self.warn, self.severe),
            evidence=evidence | {"lost in them": percent(lost)},
            advice=[
                "look at those steps on the timeline"
                + (
                    f": {what} takes longer there"
                    if what
                    else ", and at what the script does every so many steps"
                )
            ],
            gain=lost,
            ranks=analysis.ranks,
            steps=worst,
        )


def _step_times(analysis: Analysis) -> dict[int, float]:
    """Seconds from each training step to the next, of the rank on which it is longest; none before an evaluation."""
    found: dict[int, float] = {}
    for rank in analysis.ranks:
        for this, following in pairwise(analysis.run.steps.get(rank, ())[FIRST:]):
            if not this.evaluates and not following.evaluates and following.step == this.step + 1:
                found[this.step] = max(found.get(this.step, 0.0), following.start_s - this.start_s)
    return found


def _what_grew(analysis: Analysis, steps: list[int]) -> str:
    """The part that is longer in these steps than in usual ones by most; empty without their spans."""
    grown: dict[str, float] = {}
    for rank, own in analysis.parts.items():
        for period, parts in own.items():
            if period.step in steps:
                for name in Parts._fields:
                    more = getattr(parts, name) - getattr(analysis.typical[rank], name)
                    grown[name] = max(grown.get(name, 0.0), more)
    return max(grown, key=lambda name: grown[name]) if grown and max(grown.values()) > 0 else ""
