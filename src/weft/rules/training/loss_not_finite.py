"""A loss that is no number any more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule
from weft.rules.training.values import losses


@dataclass(frozen=True)
class LossNotFinite(Rule):
    """Is the loss nan or infinite?"""

    least_steps = 0
    loses_run = True
    aliases = ("ExplodingTensor",)
    explains = ("LossNotDecreasing", "ExplodingGradient", "VanishingGradient")

    def evaluate(self, analysis: Analysis) -> Finding:
        name, values = losses(analysis)
        if not values:
            return self.abstain("no loss was logged (`weft.log` does)")
        wrong = [(step, value) for step, value in values if not math.isfinite(value)]
        if not wrong:
            return self.passed(f"the {name} was finite in all {len(values)} steps")
        first, value = wrong[0]
        return self.critical(
            f"the {name} is {value} since step {first}",
            evidence={
                "first step": first,
                "such steps": len(wrong),
                "last finite value": next(
                    (v for s, v in reversed(values) if s < first and math.isfinite(v)), "none"
                ),
            },
            advice=[
                "go on from a checkpoint before that step, with a lower learning rate or a warm-up",
                "clip gradients: `weft.clip_grad_norm_(model.parameters(), 1.0)`",
            ],
            ranks=analysis.ranks,
            steps=[step for step, _ in wrong[:5]],
        )
