"""A job that is asked to end saves first, and all its ranks end after the same step.

asked    under `weft run` the launcher says it, in the ranks' page; else SIGTERM or SIGUSR1 to any rank does
agree    the ranks look together, after steps that all of them know: one small exchange about once a second
end      with the code 75, which says: start me again and I go on
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from weft.checkpoint.agree import Ranks
from weft.checkpoint.save import Job

GO_ON = os.EX_TEMPFAIL
"""The exit code of a job that has saved and ended because it was asked to: 75."""
LOOK_S = 1.0
"""So many seconds are about between two looks."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stops(Protocol):
    """A request to end the job."""

    def open(self) -> None:
        """From now on the ranks heed it."""

    def close(self, ends: bool = False) -> None:
        """They heed it no more. ``ends``: because they end, as they were asked to."""

    def after_step(self) -> bool:
        """True if the job has to save and end now; the same on all ranks, which call this after each step."""


class Asked(Protocol):
    """One that knows after each step whether the job was asked to end."""

    asked: bool


class StopTogether:
    """A request to end the job on which replicas have agreed at the end of the step: each is a job of its own.

    Args:
        stop: That of the ranks of this replica.
        replicas: Know what all replicas have agreed on.
    """

    def __init__(self, stop: Stops, replicas: Asked) -> None:
        self.open, self.close, self._replicas = stop.open, stop.close, replicas

    def after_step(self) -> bool:
        return self._replicas.asked


class Stop:
    """A request to end the job, heard on any rank and agreed on by all.

    Args:
        job: The job that is asked.
        ranks: All its ranks, which make the same calls.
        clock: Seconds, from any start.
    """

    def __init__(self, job: Job, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        self._course, self._ranks, self._clock = job.monitor.course, ranks, clock
        self._launched = job.place.shared_fd is not None
        self._heard = False
        self._before: dict[int, Any] = {}
        self._steps, self._until = 0, 1
        self._since = clock()

    def open(self) -> None:
        """From now on the ranks heed it."""
        self._since = self._clock()
        self._course.heeded = 1
        if self._launched or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)

    def close(self, ends: bool = False) -> None:
        """They heed it no more. ``ends``: because they end, as they were asked to."""
        if not ends:
            self._course.heeded = 0
        for number in list(self._before):
            self._as_before(number)

    def _hear(self, number: int, _: FrameType | None) -> None:
        """The first time a signal is a request; the second time it does what it did before."""
        self._heard = True
        self._as_before(number)

    def _as_before(self, number: int) -> None:
        signal.signal(number, self._before.pop(number))

    def after_step(self) -> bool:
        """True if the job has to save and end now; the same on all ranks, which call this after each step."""
        self._steps += 1
        if self._steps < self._until:
            return False
        asked = self._heard or bool(self._course.asked)
        if self._ranks.count == 1:
            self._steps = 0
            return asked
        answers = [json.loads(text) for text in self._ranks.gather(json.dumps([asked, self._next()]))]
        self._steps, self._until, self._since = 0, answers[0][1], self._clock()
        return any(asked for asked, _ in answers)

    def _next(self) -> int:
        """After how many steps the next look is, as this rank would have it: at most twice as many as before."""
        step_s = (self._clock() - self._since) / self._steps
        return max(1, min(2 * self._until, int(LOOK_S / step_s) if step_s else 2 * self._until))
