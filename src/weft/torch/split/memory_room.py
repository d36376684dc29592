"""The meaning of ``optimize`` where nobody has said it: by speed, if such a split fits the ranks' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.config import Settings
from weft.partition.cost import memory_bytes
from weft.plan.chosen import most_in_flight
from weft.schedule.table import KINDS
from weft.torch.split.open_modules import graph_of
from weft.torch.split.unit_tree import Piece

ROOM = 0.7
"""A rank's part may take so much of its memory; the rest is for the libraries and what a step takes for moments."""
BY_MEMORY = 0.8


def fits(pieces: Sequence[Piece], partitions: Sequence[int], settings: Settings, available: float) -> bool:
    """True if every partition's parameters, gradients, optimizer states and activations leave room."""
    taken = [0] * settings.partitions
    for unit, at in zip(graph_of(list(pieces)), partitions, strict=True):
        taken[at] += memory_bytes(unit, most_in_flight(settings))
    return max(taken) <= ROOM * available


def decide_optimize(settings: Settings, optimize: str) -> Settings:
    """The settings with ``optimize`` as given, where they leave that open."""
    if settings.optimize != "auto":
        return settings
    weight = settings.memory_weight
    if optimize == "memory" and not KINDS[settings.pipeline].timed:
        weight = BY_MEMORY
    return replace(settings, optimize=optimize, memory_weight=weight)  # type: ignore[arg-type]
