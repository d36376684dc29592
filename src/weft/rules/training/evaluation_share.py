"""Evaluation that takes much of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from weft.analysis.analysis import Analysis
from weft.rules.measures import percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class EvaluationShare(Rule):
    """Does evaluation take much of the run?

    The measure is the share of steps without a backward pass, with what lies between them, of the time after the first
    step, on the rank with most of it. The advice names how seldom it would have to be done to take `good` of that time.
    """

    least_steps = 0

    warn: float = 0.20
    severe: float = 0.75
    good: float = 0.05
    least_trained: int = 5

    def evaluate(self, analysis: Analysis) -> Finding:
        rank = max(analysis.run_times, key=lambda each: analysis.run_times[each].evaluate, default=None)
        if rank is None or not analysis.run_times[rank].evaluate:
            return self.not_applicable("no step evaluated")
        spent = analysis.run_times[rank]
        runs = [(evaluates, len(list(own))) for evaluates, own in groupby(
            step.evaluates for step in analysis.run.steps[rank]
        )]  # fmt: skip
        rounds = [count for evaluates, count in runs if evaluates]
        trained = sum(count for evaluates, count in runs if not evaluates)
        if trained < self.least_trained:
            return self.abstain(f"{trained} steps trained, it needs {self.least_trained}")
        whole_s = spent.total - spent.start - spent.load - spent.first
        share = spent.evaluate / whole_s
        every = max(1, round(trained / len(rounds)))
        rest_s = (whole_s - spent.evaluate) / trained
        seldom = math.ceil(spent.evaluate / len(rounds) * (1 / self.good - 1) / rest_s) if rest_s > 0 else 0
        return self.graded(
            f"evaluation takes {percent(share)} of the time after the first step: {sum(rounds)} steps without a "
            f"backward pass, after each {every} that train",
            (share, self.warn, self.severe),
            evidence={
                "share": percent(share),
                "rounds": len(rounds),
                "steps a round": round(sum(rounds) / len(rounds)),
            },
            advice=[
                f"evaluate after each {seldom} training steps instead of {every}: it takes {percent(self.good)} then"
                if seldom > every
                else "evaluate on fewer batches",
                "larger batches for evaluation: without a backward pass they need less memory",
            ],
            ranks=[rank],
        )
