"""All checks: importing this module fills `CHECKS`."""

from __future__ import annotations

from . import (  # noqa: F401
    attributes,
    chance,
    changes,
    compiled,
    decided_number,
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
    tokens,
    training,
    uneven,
    unlike,
)
from .harness import CHECKS

__all__ = ["CHECKS"]
