"""The look of parts of memory and kinds of work on the page of a plan."""

from __future__ import annotations

from weft.plan.parallelism.memory import Memory
from weft.report.styles import DOTS, FALLING, GRID, LEVEL, PLAIN, RISING, STYLES, Style

MEMORY = {
    "parameters": Style("parameters", "#3b76b8", "#ffffff", PLAIN, "#ffffff"),
    "gradients": Style("gradients", "#e39a3b", "#24292f", RISING, "#eebb78"),
    "states": Style("optimizer states", "#b8507a", "#ffffff", GRID, "#dc9ab6", 1.0),
    "activations": Style("activations", "#3f8f5b", "#ffffff", FALLING, "#6fb387"),
    "moment": Style("for a moment", "#8a63b5", "#ffffff", DOTS, "#cdb8e2"),
    "reserved": Style("driver, libraries", "#5f7480", "#ffffff", LEVEL, "#93a4ae", 1.5),
}
"""By the fields of `Memory`, in their order."""
LOOKS = MEMORY | {kind: STYLES[kind] for kind in ("F", "B", "I", "W", "reduce", "optimizer")}


def memory_parts(memory: Memory) -> dict[str, float]:
    """The fields of a memory that have a look, in bytes; they add up to its total."""
    return {name: getattr(memory, name) for name in MEMORY}
