"""What this thread is at: a microbatch of a step, or its backward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import SplitError
from weft.torch import state
from weft.torch.glue import running
from weft.torch.tracer import Tracer

_scale = threading.local()


@contextmanager
def current_scale(weight: float, fault: str = "") -> Iterator[None]:
    """Inside, a microbatch that weighs so much in the mini-batch runs on this thread.

    ``fault``: why it must not have a backward pass."""
    before = getattr(_scale, "weight", None)
    _scale.weight, _scale.trains = weight, False
    try:
        with no_training(fault):
            yield
    finally:
        _scale.weight = before


@contextmanager
def no_training(fault: str) -> Iterator[None]:
    """Inside, a backward pass raises :class:`SplitError` with this text, if there is one."""
    _scale.fault = fault
    try:
        yield
    finally:
        _scale.fault = ""


def begin_backward() -> None:
    """A backward pass begins on this thread; see :func:`no_training`."""
    _scale.trains = True
    if getattr(_scale, "fault", ""):
        raise SplitError(_scale.fault)


def trains() -> bool:
    """Whether the microbatch of this thread has had a backward pass."""
    return getattr(_scale, "trains", False)


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
