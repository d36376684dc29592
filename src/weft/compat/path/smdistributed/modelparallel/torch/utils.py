"""Functions for scripts that merge or compare checkpoints."""

from typing import Any


def get_distribution_axis(parameter: Any) -> None:
    """The dim along which a parameter is split over tensor-parallel ranks: none."""


def rmsg(message: object) -> str:
    """A message with the rank before it."""
    from weft.torch import rank

    return f"[{rank()}] {message}"
