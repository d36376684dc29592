"""Events of TensorFlow for a recording: waits for the next element of a data set, and optimizers."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.session.session import Session
from weft.tensorflow import private


def observe(session: Session) -> list[Callable[[], None]]:
    """From now on these have spans; what is returned ends that.

    Inside of a ``tf.function``, as Keras's ``fit`` has it, Python is called before and after the operations.
    """
    return [
        private.watch_iterators(*_calls(session, "data")),
        private.watch_updates(*_calls(session, "optimizer")),
    ]


def _calls(session: Session, kind: str) -> tuple[Callable[[], int], Callable[[], int]]:
    """The functions to call before and after something that becomes a span."""
    began: list[float] = []

    def before() -> int:
        began[:] = [time.perf_counter()]
        return 0

    def after() -> int:
        if began and session.recorder is not None:
            session.recorder.add(kind, session.steps or -1, -1, began.pop(), time.perf_counter())
        return 0

    return before, after
