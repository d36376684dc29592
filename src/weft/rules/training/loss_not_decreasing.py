"""A loss that does not fall."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.analysis.series import deviation
from weft.rules.rule import Finding, Rule
from weft.rules.training.values import losses

NOISE = 6.0
"""So many standard errors of a median may lie between the lowest of many windows and any other one."""


@dataclass(frozen=True)
class LossNotDecreasing(Rule):
    """Does the loss not fall, or does it rise?

    Compared are medians of `num_steps` values. It rises if the last one is above the lowest by
    `increase_threshold_percent`, and by more than its noise explains; it does not fall if none is below the first by
    `diff_percent`.
    """

    least_steps = 0

    num_steps: int = 10
    diff_percent: float = 0.1
    increase_threshold_percent: float = 5.0

    def evaluate(self, analysis: Analysis) -> Finding:
        name, found = losses(analysis)
        values = [(step, value) for step, value in found if math.isfinite(value)]
        if len(values) < 3 * self.num_steps:
            return self.abstain(f"{len(values)} values of a loss, it needs {3 * self.num_steps}")
        starts = range(len(values) % self.num_steps, len(values), self.num_steps)
        windows = [[value for _, value in values[start : start + self.num_steps]] for start in starts]
        medians = [median(window) for window in windows]
        lowest, size = min(medians), abs(min(medians)) or 1.0
        steps = [values[starts[medians.index(lowest)]][0], values[-1][0]]
        evidence = {"first": f"{medians[0]:.6g}", "lowest": f"{lowest:.6g}", "last": f"{medians[-1]:.6g}"}
        rise = medians[-1] - lowest
        if 100 * rise / size > self.increase_threshold_percent and rise > NOISE * _noise(windows):
            return self.warning(
                f"the {name} rose from {lowest:.6g} to {medians[-1]:.6g}",
                evidence=evidence,
                advice=["lower the learning rate, or go back to a checkpoint from before it rose"],
                steps=steps,
            )
        if 100 * (medians[0] - lowest) / (abs(medians[0]) or 1.0) < self.diff_percent:
            return self.warning(
                f"the {name} does not fall: {medians[0]:.6g} at the begin, {medians[-1]:.6g} at the end",
                evidence=evidence,
                advice=[
                    "try another learning rate, and see whether the model learns a single mini-batch by heart"
                ],
                steps=steps,
            )
        return self.passed(f"the {name} falls", **evidence)


def _noise(windows: list[list[float]]) -> float:
    """The standard error of a window's median: 1.2533 standard deviations by the root of its size."""
    apart = [value - median(window) for window in windows for value in window]
    return 1.2533 * 1.4826 * deviation(apart) / math.sqrt(len(windows[0]))
