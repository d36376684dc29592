"""The values that a script logged, as series."""

from __future__ import annotations

from weft.analysis.analysis import Analysis

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
