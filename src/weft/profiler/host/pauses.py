"""Python's garbage collector as it stands in the way of a recorded job; and what a forked process must not record."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from weft.profiler.recorder import Recorder

LEAST_S = 100e-6
"""Shorter collections are not recorded."""

_recorded: weakref.WeakSet[Watch] = weakref.WeakSet()


class Job(Protocol):
    """The recorded job: a session."""

    recorder: Recorder | None
    steps: int


class Watch:
    """A callback of the garbage collector, before and after it works."""

    def __init__(self, session: Job) -> None:
        self.session, self._began_s = session, 0.0
        _recorded.add(self)

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began_s = now
        elif now - self._began_s >= LEAST_S and (recorder := self.session.recorder) is not None:
            recorder.add("collector", self.session.steps or -1, -1, self._began_s, now)


def watch(session: Job) -> Callable[[], None]:
    """From now on collections become spans; the result ends that. A process that is forked has no part in it."""
    made = Watch(session)
    gc.callbacks.append(made)
    return lambda: gc.callbacks.remove(made)


def _leave_to_parent() -> None:
    """In a forked process: the files are those of the parent."""
    for each in list(_recorded):
        each.session.recorder = None


os.register_at_fork(after_in_child=_leave_to_parent)
