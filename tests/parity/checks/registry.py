"""All checks: importing this module fills `CHECKS`."""

from __future__ import annotations

from . import (
    backward,
    chance,
    first_step,
    glue,
    inputs,
    losses,
    memory,
    modules,
    placement,
    random_programs,
    structure,
    training,
)
from .harness import CHECKS

__all__ = [
    "CHECKS",
    "backward",
    "chance",
    "first_step",
    "glue",
    "inputs",
    "losses",
    "memory",
    "modules",
    "placement",
    "random_programs",
    "structure",
    "training",
]
