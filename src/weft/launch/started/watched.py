"""Notices changes of a job: by streams of changes, and where there are none by asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

AGAIN_S = 30.0
"""So often it is asked although no change came."""
LEAST_S = 1.0
"""A stream that ends sooner is begun again after that time."""
TOGETHER_S = 0.1
_MOST_FAULTS = 3


class Watched:
    """Changes of a job, by streams that give something for each of them; each is read in a thread of its own.

    A stream begins with what is there. One that fails or ends at once three times in a row is given up.

    Args:
        streams: Each call begins a stream anew.
    """

    def __init__(self, streams: Sequence[Callable[[], Iterator[object]]]) -> None:
        self._changed = threading.Event()
        self._changed.set()
        self._asked = time.monotonic()
        self._open = [False for _ in streams]
        self._over = False
        for number, stream in enumerate(streams):
            name = f"weft-watch-{number}"
            threading.Thread(target=self._read, args=(number, stream), name=name, daemon=True).start()

    @property
    def streaming(self) -> bool:
        """True if all streams are open."""
        return all(self._open)

    def due(self) -> bool:
        """True if it is time to ask: something has changed, or no stream would say so."""
        due = self._changed.is_set() or not self.streaming or time.monotonic() - self._asked > AGAIN_S
        if due:
            self._changed.clear()  # before the answer comes: a change after that is another one
            self._asked = time.monotonic()
        return due

    def wait(self, seconds: float) -> None:
        """For so long, or until a change comes; those that come at once are one."""
        if self._changed.wait(seconds):
            time.sleep(min(seconds, TOGETHER_S))

    def close(self) -> None:
        """Streams are not begun again."""
        self._over = True

    def _read(self, number: int, stream: Callable[[], Iterator[object]]) -> None:
        faults = 0
        while not self._over and faults < _MOST_FAULTS:
            began = time.monotonic()
            with suppress(Exception):  # asking is left, and says what is wrong
                for _ in stream():
                    self._open[number] = True
                    self._changed.set()
                    if self._over:
                        break
            self._open[number] = False
            self._changed.set()
            left = LEAST_S - (time.monotonic() - began)
            faults = faults + 1 if left > 0 else 0
            time.sleep(max(left, 0))
