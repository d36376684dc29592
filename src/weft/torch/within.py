"""What this thread is at: a microbatch of a step, or its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.torch import state
from weft.torch.glue import running
from weft.torch.trace import Tracer

_scale = threading.local()


@contextmanager
def current_scale(weight: float) -> Iterator[None]:
    """Inside, a microbatch with this share of the mini-batch's samples runs on this thread."""
    before = getattr(_scale, "weight", None)
    _scale.weight = weight
    try:
        yield
    finally:
        _scale.weight = before


def share() -> float | None:
    """What the microbatch that runs on this thread has of the mini-batch's samples; None outside of a step."""
    return getattr(_scale, "weight", None)


def in_microbatch() -> bool:
    """Whether a step runs on this thread."""
    return share() is not None


@contextmanager
def going_back() -> Iterator[None]:
    """Inside, a backward pass runs on this thread."""
    _scale.back = True
    try:
        yield
    finally:
        _scale.back = False


def between() -> bool:
    """Whether code of a step runs on this thread, and neither a backward pass nor, as far as one can tell, a unit."""
    if Tracer.current is not None:
        return Tracer.current.outside_modules and not Tracer.current.going_back
    return running() is not None or (
        in_microbatch() and state.session().pipeline is None and not getattr(_scale, "back", False)
    )
