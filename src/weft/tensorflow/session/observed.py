"""What a recording sees of TensorFlow by itself: waits for the next element of a data set."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.session.session import Session
from weft.tensorflow import private


def observe(session: Session) -> list[Callable[[], None]]:
    """From now on these have spans; what is returned ends that.

    Inside of a ``tf.function``, as Keras's ``fit`` has it, Python is called before and after the operation.
    """
    began: list[float] = []

    def before() -> int:
        began[:] = [time.perf_counter()]
        return 0

    def after() -> int:
        if began and session.recorder is not None:
            session.recorder.add("data", session.steps, -1, began.pop(), time.perf_counter())
        return 0

    return [private.watch_iterators(before, after)]
