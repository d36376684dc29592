"""Gradients that grow without end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule
from weft.rules.training.values import NORM, series


@dataclass(frozen=True)
class ExplodingGradient(Rule):
    """Do gradients grow without end?

    The median norm of the last `patience` steps is `factor` times the lowest median of so many steps; or the norm is
    not finite in more than `not_finite` of the steps. A few such steps belong to a scaled loss.
    """

    least_steps = 0
    explains = ("LossNotDecreasing",)

    factor: float = 100.0
    not_finite: float = 0.10
    patience: int = 10

    def evaluate(self, analysis: Analysis) -> Finding:
        found = series(analysis, NORM)
        if len(found) < self.patience:
            return self.abstain(f"{len(found)} norms of gradients, it needs {self.patience}")
        norms = [value for _, value in found if math.isfinite(value)]
        missing = 1 - len(norms) / len(found)
        advice = ["clip them: `weft.clip_grad_norm_(model.parameters(), 1.0)`", "lower the learning rate"]
        if missing > self.not_finite:
            steps = [step for step, value in found if not math.isfinite(value)]
            return self.warning(
                f"the gradients' norm was not finite in {len(steps)} of {len(found)} steps",
                advice=advice,
                steps=steps[:5],
            )
        if len(norms) < 2 * self.patience:
            return self.abstain(f"{len(norms)} norms of gradients, it needs {2 * self.patience}")
        starts = range(0, len(norms) - self.patience + 1, self.patience)
        lowest = min(median(norms[start : start + self.patience]) for start in starts)
        last = median(norms[-self.patience :])
        evidence = {"lowest norm": f"{lowest:.3g}", "norm at the end": f"{last:.3g}"}
        if last <= self.factor * lowest:
            return self.passed(f"the gradients' norm is {last:.3g}", **evidence)
        return self.warning(
            f"the gradients' norm grew from {lowest:.3g} to {last:.3g}", evidence=evidence, advice=advice
        )
