"""The report of a run: its figures, what the rules found, what would be gained, an earlier run beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.analysis.analysis import Analysis
from weft.analysis.compare import Comparison
from weft.analysis.plan.comparison import BesidePlan
from weft.analysis.scaling import Scaling
from weft.analysis.series import median, outliers
from weft.rules.rule import FOUND, Finding, Rule, Status
from weft.rules.verdict import Verdict

OUTLIER_DEVIATIONS, OUTLIER_SHARE = 6.0, 0.2
"""A step is an outlier above the median by so many median deviations, and by this share of it."""
SHOWN = (*FOUND, Status.ERROR)


@dataclass(frozen=True)
class Report:
    """A run with what was found in it.

    Attributes:
        analysis: The run.
        verdict: The one thing to say first, with what every rule said under it.
        rules: Those that judged; their questions and parameters are shown.
        comparison: The run beside an earlier one.
        scaling: Runs on different numbers of ranks.
        plan: The run beside its plan, if one is known.
        step: The step to open the timeline at; nothing for the most usual one.
    """

    analysis: Analysis
    verdict: Verdict
    rules: Sequence[Rule] = ()
    comparison: Comparison | None = None
    scaling: Scaling | None = None
    plan: BesidePlan | None = None
    step: int | None = None

    @cached_property
    def findings(self) -> list[Finding]:
        """The finding of every rule, one each, in the order of the verdict."""
        first = [self.verdict.finding] if self.verdict.finding is not None else []
        return [*first, *self.verdict.under]

    @cached_property
    def found(self) -> list[Finding]:
        """Findings that say what is to be mended or known, and rules that failed."""
        return [each for each in self.findings if each.status in SHOWN]

    @cached_property
    def others(self) -> list[Finding]:
        """The findings of the other rules: nothing is wrong, or too little is known."""
        return [each for each in self.findings if each.status not in SHOWN]

    @cached_property
    def step_times(self) -> list[tuple[int, float, float]]:
        """Every training step: its number, when it began, how long it took on the slowest rank."""
        found: dict[int, tuple[float, float]] = {}
        for rank in self.analysis.ranks:
            for step in self.analysis.steps(rank):
                start_s, longest_s = found.get(step.step, (step.start_s, 0.0))
                found[step.step] = min(start_s, step.start_s), max(longest_s, step.step_s)
        return [(number, *found[number]) for number in sorted(found)]

    @cached_property
    def outliers(self) -> list[int]:
        """The numbers of steps that took far longer than the median."""
        times = [seconds for _, _, seconds in self.step_times]
        return [self.step_times[place][0] for place in outliers(times, OUTLIER_DEVIATIONS, OUTLIER_SHARE)]

    @cached_property
    def median_step_s(self) -> float:
        """Of all training steps, from begin to end; without the scripts' part between them."""
        return median([seconds for _, _, seconds in self.step_times]) if self.step_times else 0.0

    @cached_property
    def usual_step(self) -> int | None:
        """The recorded step that took the median time."""
        usual = self.analysis.usual_steps or self.analysis.timeline.steps
        taken: dict[int, list[float]] = {step: [] for step in usual}
        for own in self.analysis.parts.values():
            for period in own:
                if period.step in taken:
                    taken[period.step].append(period.duration_s)
        means = sorted((statistics.fmean(times), step) for step, times in taken.items() if times)
        return means[(len(means) - 1) // 2][1] if means else None

    def step_of(self, finding: Finding) -> int | None:
        """The recorded step on which a finding shows best."""
        recorded = set(self.analysis.timeline.steps)
        return next((step for step in finding.steps if step in recorded), self.usual_step)
