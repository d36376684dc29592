"""Gradients that are nearly nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule
from weft.rules.training.values import NORM, series


@dataclass(frozen=True)
class VanishingGradient(Rule):
    """Are gradients so small that nothing is learned?

    The median norm of the last `patience` steps is below `threshold`.
    """

    least_steps = 0

    threshold: float = 1e-7
    patience: int = 10

    def evaluate(self, analysis: Analysis) -> Finding:
        norms = [value for _, value in series(analysis, NORM) if math.isfinite(value)]
        if len(norms) < self.patience:
            return self.abstain(f"{len(norms)} norms of gradients, it needs {self.patience}")
        last = median(norms[-self.patience :])
        evidence = {
            "norm at the begin": f"{median(norms[: self.patience]):.3g}",
            "norm at the end": f"{last:.3g}",
        }
        if last >= self.threshold:
            return self.passed(f"the gradients' norm is {last:.3g}", **evidence)
        return self.warning(
            f"the gradients' norm fell to {last:.3g}",
            evidence=evidence,
            advice=[
                "normalise layers or add residual connections; look at how the parameters are initialised"
            ],
        )
