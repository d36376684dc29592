"""Two pages of one job, on two hosts, kept alike: what changed in one, as messages, and messages put into the other.

agent -> launcher   signs and reports of its own ranks; how far the job is; where rank 0 listens
launcher -> agent   signs of all others; whether the job ends, or is asked to save; where rank 0 listens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weft.launch.remote.wire import Message
from weft.watch.heartbeat import Page

SLOWLY_S = 5.0
"""Seconds after which an agent gets the state of ranks on other hosts again."""
_TICK_S = 0.1
_FIELDS = {"agent": ("heeded", "saves"), "launcher": ("asked",)}


class Mirror:
    """One side's page.

    Args:
        page: That of this host.
        side: ``agent`` or ``launcher``.
        ranks: Those whose signs are sent from here.
        leads: The agent's host has rank 0, so it says where that listens.
        every_s: Signs that only go on are sent so often; a new state is sent at once.
    """

    def __init__(
        self,
        page: Page,
        side: str,
        ranks: Iterable[int],
        leads: bool = False,
        every_s: float = _TICK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page, self._side, self._ranks, self._leads = page, side, [*ranks], leads
        self._every_s, self._clock = every_s, clock
        self._sent: dict[Any, Any] = {}
        self._at: dict[int, float] = {}
        self._looked = float("-inf")

    def changes(self, at_once: bool = False) -> Iterator[Message]:
        """Messages with what the other side does not have yet. ``at_once``: also of signs just sent."""
        now = self._clock()
        if not at_once and now - self._looked < _TICK_S:
            return
        self._looked = now
        job: dict[str, Any] = {name: getattr(self._page.course, name) for name in _FIELDS[self._side]}
        if self._side == "launcher":
            job["ending"] = self._page.ending
        if self._leads or self._side == "launcher":
            job["leader"] = self._page.leader
        if self._sent.get("job", {}) != job:
            self._sent["job"] = job
            yield {"kind": "job", **job}, b""
        for rank in self._ranks:
            yield from self._signs(rank, now, at_once)

    def _signs(self, rank: int, now: float, at_once: bool) -> Iterator[Message]:
        head = self._page.head(rank)
        before = self._sent.get(rank)
        if head != before:
            new_state = before is None or before[:8] != head[:8]
            if at_once or new_state or now - self._at.get(rank, float("-inf")) >= self._every_s:
                self._sent[rank], self._at[rank] = head, now
                yield {"kind": "sign", "rank": rank}, head
        if self._side == "agent" and ("report", rank) not in self._sent and (text := self._page.report(rank)):
            self._sent["report", rank] = True
            yield {"kind": "report", "rank": rank}, text.encode()

    def apply(self, message: Message) -> bool:
        """True if a message was about the page, which has it then."""
        values, data = message
        kind, rank = values.get("kind"), values.get("rank")
        if kind == "job":
            course = self._page.course
            for name in ("asked", "heeded"):
                if isinstance(values.get(name), int):
                    setattr(course, name, values[name])
            course.saves = max(course.saves, values.get("saves", 0))  # one host counts them
            if values.get("ending"):
                self._page.end()
            if isinstance(values.get("leader"), str):
                self._page.leader = values["leader"]
        elif kind == "sign" and type(rank) is int and 0 <= rank < self._page.ranks:
            self._page.put_head(rank, data)
        elif kind == "report" and type(rank) is int and 0 <= rank < self._page.ranks:
            self._page.write_report(rank, data[: self._page.report_limit].decode(errors="replace"))
        else:
            return False
        return True
