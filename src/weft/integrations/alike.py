"""Ranks that must shuffle alike go on from the same random states."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from weft.communication import objects


def draw_alike(group: objects.CommGroup) -> None:
    """The random states of PyTorch, Python and NumPy become those of the group's first rank; collective over it."""
    numpy: Any = sys.modules.get("numpy")
    kept = numpy.random.get_state() if numpy is not None else None
    first = objects.allgather([torch.get_rng_state(), random.getstate(), kept], group)[0]
    torch.set_rng_state(first[0])
    random.setstate(first[1])
    if numpy is not None and first[2] is not None:
        numpy.random.set_state(first[2])
