"""Remedies for a partition that takes longer than the others."""

from __future__ import annotations

from weft.analysis.analysis import Analysis
from weft.rules.rule import LEAST_GAIN

MOST_LINES = 9
"""A split that needs more lines is told without them: some of them alone make another one."""


def lighten(analysis: Analysis, partition: int) -> list[str]:
    """Lines that move work away from a partition: those of the best split, where units and their costs are known."""
    found = []
    if analysis.setting("auto_partition") is False:
        found.append('let weft split the model: `"auto_partition": True`')
    elif analysis.setting("optimize") == "memory":
        found.append('balance time instead of memory: `"optimize": "speed"`')
    suggestion = analysis.suggestion
    if suggestion is None:
        return [
            *found,
            f"move modules from partition {partition} to others: `weft.set_partition(module, ...)`",
        ]
    if not suggestion.moves:
        return found or [f"cut the modules of partition {partition} into smaller ones: {suggestion.text}"]
    lines = ", ".join(f"`{line}`" for line in suggestion.lines) if len(suggestion.lines) <= MOST_LINES else ""
    return [*found, f"move {suggestion.text}{': ' if lines else ''}{lines}"]


def gain_of_lightening(analysis: Analysis) -> float | None:
    """The share of a step that `lighten`'s lines save; nothing if that is not known.

    Where no split is better, cutting modules saves no more than equal partitions would: told if even that is nothing.
    """
    suggestion, most = analysis.suggestion, analysis.what_if.gain("equal partitions")
    if suggestion is not None and suggestion.moves:
        return suggestion.gain
    return most if most is not None and most < LEAST_GAIN else None
