"""Ranks of one copy of a model read the same batches: they shuffle alike, and none has samples of its own."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from weft.communication import objects
from weft.errors import UsageError
from weft.torch.session import current


def draw_alike(group: objects.CommGroup) -> None:
    """The random states of PyTorch, Python and NumPy become those of the group's first rank; collective over it."""
    numpy: Any = sys.modules.get("numpy")
    kept = numpy.random.get_state() if numpy is not None else None
    first = objects.allgather([torch.get_rng_state(), random.getstate(), kept], group)[0]
    torch.set_rng_state(first[0])
    random.setstate(first[1])
    if numpy is not None and first[2] is not None:
        numpy.random.set_state(first[2])


def refuse_apart() -> None:
    """:class:`UsageError` if ranks that split tensors are to read samples of their own."""
    if current.session().settings.inputs == "per_rank":
        raise UsageError(
            '"inputs": "per_rank" lets ranks that split tensors read samples of their own, which a loop that weft does '
            "not own would count as replicas: leave it out"
        )
