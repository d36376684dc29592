"""Rules about what a script logs: does the loss fall, do gradients stay within bounds?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from weft.analysis.analysis import Analysis
from weft.analysis.series import deviation
from weft.rules.rule import Finding, Rule

NORM = "gradient_norm"


def losses(analysis: Analysis) -> tuple[str, list[tuple[int, float]]]:
    """The name of the loss, and its value by step: `loss`, else the only value that was logged; else nothing."""
    found = series(analysis, "loss")
    if found:
        return "loss", found
    names = {
        name for own in analysis.run.steps.values() for step in own for name in step.values if name != NORM
    }
    if len(names) == 1:
        (name,) = names
        return name, series(analysis, name)
    return "", []


def series(analysis: Analysis, name: str) -> list[tuple[int, float]]:
    """A value by step: the mean of the ranks that logged it, on steps that trained."""
    found: dict[int, list[float]] = {}
    for own in analysis.run.steps.values():
        for step in own:
            if name in step.values and not step.evaluates:
                found.setdefault(step.step, []).append(step.values[name])
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]


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


@dataclass(frozen=True)
class ExplodingGradient(Rule):
    """Do gradients grow without end?

    The median norm of the last `patience` steps is `factor` times the lowest median of so many steps; or the norm is
    not finite in more than `not_finite` of the steps.
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
