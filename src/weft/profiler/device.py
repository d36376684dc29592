"""When a GPU did what the host has handed to it, from events on the device's own stream.

    host     F0 handed over | F1 handed over |
    device             F0 ---------------e0 F1 --------------e1       e: an event after what was handed over

An event is asked later whether the device has passed it, and is never waited for. What was handed over ended at its
event. It began when the one before had ended, or when the host handed it over, whichever is later. The device's clock
is tied to the host's whenever an event passes at once, which says that the device has nothing to do; PyTorch tells the
time between two events in milliseconds of 32 bits, so the tie is made anew as often as that happens. While work is
captured as a CUDA graph nothing runs, and no event may be asked: such work has the host's times.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

TIED_S = 50e-6
"""An event that passes within this time was passed at once."""
POOL = 4096
"""So many events are in flight at most; what comes then has the host's times."""


class Event(Protocol):
    """What `torch.cuda.Event(enable_timing=True)` can."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class DeviceTimes:
    """The times of one device's work.

    Args:
        make_event: Makes an event with timing.
        add: Takes what is known then: begin and end, and what else `put` was given.
        captures: Whether work is captured just now, and does not run.
    """

    def __init__(
        self,
        make_event: Callable[[], Event],
        add: Callable[..., None],
        captures: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make, self._add, self._captures = make_event, add, captures
        self._free: list[Event] = []
        self._flying: deque[tuple[Event, float, float, tuple[Any, ...]]] = deque()
        self._made = 0
        self._tie: tuple[Event, float] | None = None
        self._reached_s = float("-inf")
        self._lock = threading.Lock()
        self.dropped = 0

    def tie(self) -> None:
        """Tie the device's clock to the host's, if the device has nothing to do."""
        with self._lock:
            event = None if self._captures() else self._event()
            if event is None:
                return
            before_s = time.perf_counter()
            event.record()
            while not (passed := event.query()) and time.perf_counter() - before_s < TIED_S:
                pass
            if not passed:
                self._free.append(event)  # its next record counts
                return
            self._look()  # by the tie that was; all has passed
            if self._tie is not None:
                self._free.append(self._tie[0])
            self._tie = event, (before_s + time.perf_counter()) / 2

    def put(self, start_s: float, end_s: float, *what: Any) -> None:
        """Work was handed over from `start_s` to `end_s` on the host."""
        with self._lock:
            if self._captures():
                self._add(start_s, end_s, *what)
                return
            event = self._event() if self._tie is not None else None
            if event is None:
                self.dropped += 1
                self._add(start_s, end_s, *what)
                return
            event.record()
            self._flying.append((event, start_s, end_s, what))
            self._look()

    def look(self) -> None:
        """Tell of what the device has passed."""
        with self._lock:
            if not self._captures():
                self._look()

    def close(self) -> None:
        """Tell of the rest, too: by the host's times, where the device has not passed it."""
        with self._lock:
            self._look()
            while self._flying:
                _, start_s, end_s, what = self._flying.popleft()
                self._add(start_s, end_s, *what)

    def _look(self) -> None:
        while self._flying and self._tie is not None and self._flying[0][0].query():
            event, start_s, _, what = self._flying.popleft()
            tied, tied_s = self._tie
            begin_s = max(start_s, self._reached_s)
            self._reached_s = max(begin_s, tied_s + tied.elapsed_time(event) / 1e3)
            self._add(begin_s, self._reached_s, *what)
            self._free.append(event)

    def _event(self) -> Event | None:
        if self._free:
            return self._free.pop()
        if self._made >= POOL:
            return None
        self._made += 1
        return self._make()
