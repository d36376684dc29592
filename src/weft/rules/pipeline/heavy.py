"""What can be done about a partition that takes longer than the others."""

from __future__ import annotations

from weft.analysis.analysis import Analysis

MOST_LINES = 6
"""No more moves than that are told by their lines."""


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
    lines = ", ".join(f"`{move.line}`" for move in suggestion.moves[:MOST_LINES])
    more = f", and {len(suggestion.moves) - MOST_LINES} more" if len(suggestion.moves) > MOST_LINES else ""
    return [*found, f'move {suggestion.text}: `"auto_partition": False`, {lines}{more}']
