"""One process looked at again and again: the operation on a file that it stands in, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable

from weft.watch.files.operation import Operation, find
from weft.watch.heartbeat import Page, State

EVERY_S = 1.0
IDLE_S = 2.0
"""A rank that turned to something new, or showed a sign, so lately is not looked at."""


class Look:
    """A process, seen as `find` sees it.

    Args:
        pid: Which one.
        find: Gives what it stands in.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        pid: int,
        find: Callable[[int], Operation | None] = find,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._find, self._clock = pid, find, clock
        self._call, self._since, self._looked = "", 0.0, float("-inf")
        self._mark: object = None
        self._moved = clock()
        self.found = ("", 0.0)
        """The operation that it is blocked in, and for how many seconds that has been seen; empty if in none."""

    @property
    def quiet_s(self) -> float:
        """For how long it has not got on."""
        return self._clock() - self._moved

    def observe(self, mark: object) -> tuple[str, float]:
        """`found`, looked for once a second. ``mark``: as long as this changes the process gets on."""
        now = self._clock()
        if mark != self._mark:
            self._mark, self._moved = mark, now
        if now - self._looked < EVERY_S:
            return self.found
        self._looked = now
        operation = self._find(self._pid) if now - self._moved >= IDLE_S else None
        call = "" if operation is None else operation.call
        if call != self._call:
            self._call, self._since = call, now
        self.found = ("", 0.0) if operation is None else (operation.text, now - self._since)
        return self.found


class Outside:
    """Ranks of this host as whoever has started them sees them: those that cannot show themselves what they stand in.

    A rank has not joined its job yet, or it waits in a call that holds Python's lock: then it does not beat.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._looks: dict[int, Look] = {}

    def look(self, rank: int, pid: int) -> None:
        """Shows, in the rank's slot, what its process stands in, if it does not do so itself."""
        sign = self._page.sign(rank)
        watched = sign.state in (State.RUNNING, State.FINISHING)
        if rank not in self._looks:
            self._looks[rank] = Look(pid)
        before = self._looks[rank].found
        found = self._looks[rank].observe(sign.beat if watched else None)
        if found != before:
            self._page.slot(rank).stand(*found)
