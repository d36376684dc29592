"""Parts of ``weft.torch`` that the names need only when a script uses them."""

from __future__ import annotations

import importlib
from typing import Any

PLACES = {
    **dict.fromkeys(
        ("CommGroup", "RankType", "allgather", "barrier", "broadcast", "dp_barrier", "mp_barrier", "recv_from", "send"),
        "weft.communication.objects",
    ),
    "save": "weft.torch",
    **dict.fromkeys(("load", "resume_from_checkpoint", "save_checkpoint"), "weft.compat.modelparallel.resuming"),
    "GradScaler": "weft.torch.amp",
}  # fmt: skip
"""For each name, the module that has it."""


def later(name: str) -> Any:
    """A part by its name.

    Raises :class:`AttributeError` if this version of weft does not have it.
    """
    try:
        return getattr(importlib.import_module(PLACES[name]), name)
    except (ImportError, KeyError, AttributeError) as error:
        raise AttributeError(f"weft has no {name}: {error}") from error
