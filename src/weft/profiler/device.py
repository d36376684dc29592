"""When a GPU did what the host has handed to it, from events on the device's own stream.

    host     F0 handed over | F1 handed over | waits for a message    |
    device             F0 ---------------e0 F1 ---------------e1  idle |    e: an event after what was handed over

What a rank does is noted in the order in which the host came to it, and stands in that order in a queue:

* **Work** goes on after it was handed over. It ended at its event. It began when the work before had ended, or when
  the host handed it over, whichever is later.
* **What the host did itself** (it waited, loaded data, collected garbage) held the device up from when the work before
  had ended. What the device still worked through is no time of its own.

An event is asked later whether the device has passed it, and is never waited for. The device's clock is tied to the
host's whenever an event passes at once, which says that the device has nothing to do. In between two facts keep the
tie: no event can pass before it was recorded, nor after it was seen to have passed. While work is captured as a CUDA
graph nothing runs, and no event may be asked: such work has the host's times.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

TIED_S = 50e-6
"""An event that passes within this time was passed at once."""
FIRST_S = 0.2
"""So long the first event is waited for, before there is any work."""
LAST_S = 1.0
"""So long the device may take at the end to pass what is left."""
REBASED_MS = 1000.0
"""A tie this old is moved on to an event that passed: PyTorch gives the time between two in 32 bits."""
POOL = 4096
"""So many events are in flight at most; what comes then ends when it was handed over."""

Then = Callable[[float, float], None]
"""Is called with begin and end, once they are known."""


class Event(Protocol):
    """An event of the device, as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class Moment:
    """When the device gets to where the host was; until that is known, when the host was there."""

    def __init__(self, host_s: float) -> None:
        self.at_s = host_s

    def take(self, _: float, end_s: float) -> None:
        """It is known."""
        self.at_s = end_s


class Queued(NamedTuple):
    """A span that the device has not passed yet, or that comes behind such a one. Without an event it is the host's
    own."""

    event: Event | None
    recorded_s: float
    start_s: float
    end_s: float
    then: Then
    is_work: bool = True


class DeviceTimes:
    """The times of one device's work, and of what the host does between.

    Args:
        make_event: Makes an event with timing.
        captures: Whether work is captured just now, and does not run.
    """

    def __init__(self, make_event: Callable[[], Event], captures: Callable[[], bool] = lambda: False) -> None:
        self._make, self._captures = make_event, captures
        self._free: deque[Event] = deque()
        self._queue: deque[Queued] = deque()
        """Takes more without a lock: a collector pause may be within any line."""
        self._made = 0
        self._tie: tuple[Event, float] | None = None
        self._reached_s = float("-inf")
        self._looking = threading.Lock()
        self.dropped = 0
        self.tie(FIRST_S)
        self.tie()

    def tie(self, within_s: float = TIED_S) -> None:
        """Tie the device's clock to the host's, if the device has nothing to do."""
        self.look()
        event = None if self._queue or self._captures() else self._event()
        if event is None:
            return
        before_s = time.perf_counter()
        event.record()
        while not (passed := event.query()) and time.perf_counter() - before_s < within_s:
            pass
        with self._looking:
            if not passed or self._queue:
                self._free.append(event)  # its next record counts
                return
            if self._tie is not None:
                self._free.append(self._tie[0])
            self._tie = event, (before_s + time.perf_counter()) / 2

    def work(self, start_s: float, end_s: float, then: Then, is_work: bool = True) -> None:
        """Work was handed over from `start_s` to `end_s` on the host. What `is_work` not lies within some."""
        if self._captures():
            self.own(start_s, end_s, then)
            return
        event = self._event() if self._tie is not None else None
        if event is None:
            self.dropped += 1
            self.own(start_s, end_s, then)
            return
        recorded_s = time.perf_counter()
        event.record()
        self._queue.append(Queued(event, recorded_s, start_s, end_s, then, is_work))
        self.look()

    def own(self, start_s: float, end_s: float, then: Then) -> None:
        """The host itself was busy from `start_s` to `end_s`, after what it has handed over before. Never waits."""
        self._queue.append(Queued(None, end_s, start_s, end_s, then))

    def moment(self) -> Moment:
        """When the device will have done what was handed over so far."""
        found = Moment(time.perf_counter())
        self.work(found.at_s, found.at_s, found.take, is_work=False)
        return found

    def look(self) -> None:
        """Report what the device has passed. Another thread that is at it goes on alone."""
        if not self._captures() and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()

    def close(self) -> None:
        """Report the rest, too: by the host's times, where the device does not pass it any more."""
        until_s = time.perf_counter() + LAST_S
        with self._looking, suppress(RuntimeError):  # a device that failed cannot be asked
            self._look()
            while self._queue and time.perf_counter() < until_s:
                time.sleep(0.001)
                self._look()
        while self._queue:
            left = self._queue.popleft()
            left.then(left.start_s, left.end_s)

    def _look(self) -> None:
        while self._queue:
            event, recorded_s, start_s, end_s, then, is_work = self._queue[0]
            if event is not None and not event.query():
                return
            self._queue.popleft()
            begin_s = max(start_s, self._reached_s)
            if event is not None:
                end_s = max(begin_s, self._passed_s(event, recorded_s))
                self._reached_s = end_s if is_work else self._reached_s
            then(begin_s, max(begin_s, end_s))

    def _passed_s(self, event: Event, recorded_s: float) -> float:
        """When the device passed the event, by the host's clock."""
        assert self._tie is not None
        tied, tied_s = self._tie
        later_ms = tied.elapsed_time(event)
        at_s = min(max(tied_s + later_ms / 1e3, recorded_s), time.perf_counter())
        if later_ms > REBASED_MS:
            self._tie = event, at_s
            event = tied
        else:
            self._tie = tied, at_s - later_ms / 1e3
        self._free.append(event)
        return at_s

    def _event(self) -> Event | None:
        with suppress(IndexError):
            return self._free.popleft()
        if self._made >= POOL:
            return None
        self._made += 1
        return self._make()
