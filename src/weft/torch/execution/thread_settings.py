"""Settings of this thread: a microbatch of a step, or a backward pass; and who takes its backward passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from weft.errors import SplitError
from weft.session.recording import record_backward
from weft.torch.backward.autograd import run_autograd
from weft.torch.execution.glue import running
from weft.torch.execution.gradients import Gradients, Tensors, root_gradients
from weft.torch.pytorch.private import entering_thread
from weft.torch.session import current

_scale = threading.local()


class BackwardTaker(Protocol):
    """Who runs the backward passes that a step's code asks for on this thread; see :func:`backward_taker`."""

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        """A backward pass from one tensor or several.

        ``grads``: their gradients. ``scale``: what these are multiplied by. ``keep``: the graph is not freed.
        """
        ...


class Rehearsal(BackwardTaker, Protocol):
    """A step that one rank runs by itself, to measure it. It takes the backward passes of the step's code.

    ``going_back``: a backward pass runs. ``outside_modules``: what runs is the code of the step, not of a module.
    """

    going_back: bool

    @property
    def outside_modules(self) -> bool: ...

    def inside_function(self, name: str, given: Any) -> AbstractContextManager[None]: ...


_rehearsal: Rehearsal | None = None


@contextmanager
def rehearsed(by: Rehearsal) -> Iterator[None]:
    """Inside, the step is rehearsed."""
    global _rehearsal
    before, _rehearsal = _rehearsal, by
    try:
        yield
    finally:
        _rehearsal = before


class Autograd:
    """Takes the backward passes where the whole graph is on this rank, and nobody measures it."""

    def backward(
        self, tensors: Tensors, grads: Gradients = None, keep: bool = False, scale: float = 1.0
    ) -> None:
        if share() == 0 and not any(model.sharded for model in current.session().models):
            return  # zeros would become NaN where the loss divides by what it counts
        roots, given = root_gradients(tensors, grads, scale)
        with record_backward(current.session()), going_back():
            run_autograd(roots, given, keep=keep)


AUTOGRAD = Autograd()


def backward_taker() -> BackwardTaker:
    """Who takes a backward pass of the step's code on this thread.

    The microbatch's program, by its glue, where the model is split; the rehearsal, if one goes on; `AUTOGRAD` for all
    else.
    """
    glue = running()
    if glue is not None:
        return glue
    return AUTOGRAD if _rehearsal is None else _rehearsal


def rehearsal() -> Rehearsal | None:
    """The rehearsal that goes on in this process, if one does."""
    return _rehearsal


class ThreadContext:
    """The settings of PyTorch that belong to a thread, taken where the step is called. Its microbatches enter them."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Inside, these settings are those of the thread."""
        for enter in entering_thread:
            enter()
        with ExitStack() as stack:
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self._cache))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.stream.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


@contextmanager
def current_scale(weight: float, fault: str = "") -> Iterator[None]:
    """Inside, a microbatch that weighs so much in the mini-batch runs on this thread.

    ``fault``: why the microbatch must not have a backward pass.
    """
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
    """True if the microbatch of this thread has had a backward pass."""
    return getattr(_scale, "trains", False)


def share() -> float | None:
    """The share of the mini-batch's samples that this thread's microbatch has; None outside of a step."""
    return getattr(_scale, "weight", None)


def in_microbatch() -> bool:
    """True if a step runs on this thread."""
    return share() is not None


@contextmanager
def going_back() -> Iterator[None]:
    """Inside, a backward pass runs on this thread."""
    _scale.back = True
    try:
        yield
    finally:
        _scale.back = False


def in_step_code() -> bool:
    """True if code of a step runs on this thread, and neither a backward pass nor, as far as is known, a unit."""
    if _rehearsal is not None:
        return _rehearsal.outside_modules and not _rehearsal.going_back
    return running() is not None or (
        in_microbatch() and current.session().pipeline is None and not getattr(_scale, "back", False)
    )
