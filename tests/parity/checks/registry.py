"""All checks: importing this module fills `CHECKS`."""

from __future__ import annotations

from . import (
    attributes,
    chance,
    changes,
    compiled,
    first_step,
    functions,
    glue,
    gradients,
    inputs,
    losses,
    memory,
    modules,
    normal_again,
    outside_steps,
    placement,
    random_programs,
    states,
    structure,
    training,
    uneven,
    unlike,
)
from .harness import CHECKS

__all__ = [
    "attributes",
    "CHECKS",
    "chance",
    "changes",
    "compiled",
    "first_step",
    "functions",
    "glue",
    "gradients",
    "inputs",
    "losses",
    "memory",
    "modules",
    "outside_steps",
    "normal_again",
    "placement",
    "random_programs",
    "states",
    "structure",
    "training",
    "uneven",
    "unlike",
]
