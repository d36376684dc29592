"""Where the ranks of a job see each other's signs and failures.

Launched    a page of memory that `weft run` made: the launcher watches, a rank only shows itself
Stored      the job's store: rank 0 watches all others, they watch rank 0
Alone       one process, which nobody watches
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weft.terminal_text import visible
from weft.watch.failure import Failure
from weft.watch.files.operation import IDLE_S, Look, find
from weft.watch.heartbeat import Page, Sign, Slot, State
from weft.watch.job_header import Course
from weft.watch.judge import Judge, Verdict, leaving_text
from weft.watch.process import host_name, is_alive
from weft.watch.progress_file import step_of

_FIRST_SECONDS = 0.02
"""Between two looks for ranks that have not shown any sign yet."""


class Board(ABC):
    """The port: one rank's view of the job."""

    slot: Slot
    reports_itself = True
    """A failure is printed by the rank; otherwise the launcher prints it."""
    course: Course
    """The state that `weft run` and the ranks share; without `weft run` nobody reads it."""

    @abstractmethod
    def beat(self) -> Verdict | None:
        """Shows that this rank lives, and judges those that it has to watch."""

    @abstractmethod
    def sign(self) -> Sign: ...

    @property
    @abstractmethod
    def step(self) -> int:
        """The last step of this rank, as :func:`weft.watch.progress_file.step_of` counts."""

    @abstractmethod
    def report(self, failure: Failure) -> None: ...

    @abstractmethod
    def failures(self) -> list[Failure]: ...

    @abstractmethod
    def signs(self) -> dict[int, Sign]:
        """The ranks as far as this one sees them."""

    @abstractmethod
    def everybody(self) -> dict[int, Sign]:
        """All ranks, this one among them; none as long as not all are known. From the first call on all are asked."""

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Somebody ends the job: nobody has to be waited for."""

    @abstractmethod
    def all_finishing(self) -> bool:
        """Every rank has come to its end."""

    @property
    @abstractmethod
    def somebody_left(self) -> bool:
        """True if another rank has come to its end and left, as far as was heard by now."""

    @abstractmethod
    def all_finished(self) -> bool:
        """Every other rank has left."""

    def enter(self, state: State) -> None:
        """This rank's own state from now on."""
        self.slot.set_state(state)

    def close(self) -> None:
        """No signs of others are looked at any more."""
        return


class Launched(Board):
    """Under `weft run`, or alone on a private page."""

    def __init__(self, page: Page, rank: int, reports_itself: bool = False) -> None:
        self._page = page
        self._rank = rank
        self.slot = page.slot(rank)
        self.course = page.course
        self.reports_itself = reports_itself

    def beat(self) -> None:
        self.slot.beat()

    def sign(self) -> Sign:
        return self._page.sign(self._rank)

    @property
    def step(self) -> int:
        return step_of(self._page, self._rank)

    def report(self, failure: Failure) -> None:
        self._page.write_report(self._rank, failure.to_json(self._page.report_limit))

    def failures(self) -> list[Failure]:
        return read_reports(self._page)

    def signs(self) -> dict[int, Sign]:
        return self._page.signs()

    def everybody(self) -> dict[int, Sign]:
        return self.signs()

    @property
    def ending(self) -> bool:
        return self._page.ending

    def all_finishing(self) -> bool:
        return all(sign.state >= State.FINISHING for sign in self.signs().values())

    @property
    def somebody_left(self) -> bool:
        return any(sign.state is State.FINISHED for rank, sign in self.signs().items() if rank != self._rank)

    def all_finished(self) -> bool:
        return all(sign.state is State.FINISHED for rank, sign in self.signs().items() if rank != self._rank)


def read_reports(page: Page) -> list[Failure]:
    """The failures that the ranks of a page left behind."""
    texts = [page.report(rank) for rank in range(page.ranks)]
    return [Failure.from_json(text) for text in texts if text]


class Stored(Board):
    """Under any other launcher: signs go through a connection to the job's store of their own.

    A store that is frozen with rank 0 answers nothing and times out nowhere, so a thread of its own talks
    to it: whoever judges only looks at what that thread last heard.
    """

    def __init__(self, store: Any, rank: int, world_size: int, interval: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._interval = interval
        self._page = Page.private(1)
        self._judge = Judge(sees_all=rank == 0)
        self._seen: dict[int, Sign] = {}
        self._others: dict[int, Sign] = {}
        """Ranks that this one does not watch, once somebody asks for all."""
        self._asks_all = False
        self._looks = 0
        self._missed: dict[int, int] = {}
        self._files: dict[int, Look] = {}
        self._ended = False
        self._left = False
        self._error: RuntimeError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="weft-signs", daemon=True)
        self.slot = self._page.slot(0)
        self.course = self._page.course

    def sign(self) -> Sign:
        return self._page.sign(0)

    @property
    def step(self) -> int:
        return step_of(self._page, 0)

    def beat(self) -> Verdict | None:
        self.slot.beat()
        if self._thread.ident is None:
            self._thread.start()
        if self._error is not None:
            raise self._error
        if self._ended:
            return Verdict("ended", (), "")
        return self.gone() or self._judge.observe(time.monotonic(), self.signs() | {self._rank: self.sign()})

    def _exchange(self) -> None:
        watched = range(1, self._world_size) if self._rank == 0 else range(1)
        try:
            while True:
                self._publish()
                for rank in watched:
                    if self._store.check([f"sign/{rank}"]):
                        self._seen[rank] = Sign.from_dict(json.loads(self._store.get(f"sign/{rank}")))
                for rank in range(1, self._world_size) if self._asks_all and self._rank != 0 else ():
                    if rank != self._rank and self._store.check([f"sign/{rank}"]):
                        self._others[rank] = Sign.from_dict(json.loads(self._store.get(f"sign/{rank}")))
                self._looks += 1
                self._ended = self.ending
                self._left = self._left or self._store.add("finished", 0) > 0
                if self._stop.wait(self._interval if len(self._seen) == len(watched) else _FIRST_SECONDS):
                    return
        except RuntimeError as error:
            self._error = error

    def _publish(self) -> None:
        self._store.set(f"sign/{self._rank}", json.dumps(self.sign().as_dict()))

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def local(self, rank: int) -> bool:
        """True if a watched rank runs on this host."""
        return rank in self._seen and self._seen[rank].host == host_name()

    def gone(self) -> Verdict | None:
        """The first watched rank of this host whose process ended before its time.

        One that came to its end may have said that it finished since its sign was read: that is looked at anew. So is
        why it failed, which it writes down before it ends.
        """
        looks, found = self._looks, []
        for rank, sign in dict(self._seen).items():
            early = State.ABSENT < sign.state < State.FINISHED
            if early and self.local(rank) and not is_alive(sign.pid):
                if sign.state is State.FINISHING and looks < self._missed.setdefault(rank, looks) + 2:
                    continue
                found.append(Verdict("gone", (rank,), f"{sign.who(rank)} is gone{sign.last_seen()}"))
        if not found:
            return None
        said = {failure.rank: failure for failure in self.failures()}
        for verdict in found:
            failure = said.get(verdict.ranks[0])
            if failure is not None and not failure.victim:
                return replace(verdict, text=failure.headline())
        # Some may have ended because of others, and have said so.
        return min(found, key=lambda verdict: verdict.ranks[0] in said)

    def lost(self) -> Verdict:
        """The verdict when the store itself, which rank 0 holds, does not answer any more."""
        sign = self._seen.get(0, Sign())
        return Verdict("gone", (0,), f"{sign.who(0)} does not answer any more{sign.last_seen()}")

    def culprit(self) -> Verdict | None:
        """The rank whose end broke a connection, if it can be seen from here."""
        return self.lost() if self._error is not None else self.gone()

    def lost_peer(self, victim: Failure) -> Verdict | None:
        """The verdict on the rank that a victim lost its connection to: it came to its end, or says nothing more.

        A victim may have lost it to another victim, and so on.
        """
        failed, passed, peer = {each.rank: each for each in self.failures()}, {victim.rank}, victim.peer
        while peer in failed and peer not in passed:
            passed.add(peer)
            peer = failed[peer].peer
        if peer is None or peer in passed:
            return None
        sign = self._last_sign(peer)
        if sign.state >= State.FINISHING:
            return Verdict("left", (peer,), leaving_text(peer, sign, {self._rank: self.sign()}))
        return Verdict("gone", (peer,), f"{sign.who(peer)} does not answer any more{sign.last_seen()}")

    def _last_sign(self, rank: int) -> Sign:
        """The last one of any rank, also of one that this rank does not watch."""
        with suppress(RuntimeError):
            if rank not in self._seen and self._store.check([f"sign/{rank}"]):
                return Sign.from_dict(json.loads(self._store.get(f"sign/{rank}")))
        return self._seen.get(rank, Sign())

    def blame(self, text: str) -> None:
        """Rank 0 ends, and leaves the cause to the others."""
        with suppress(RuntimeError):
            self._store.set("blamed", text)
            self._store.add("ending", 1)

    @property
    def blamed(self) -> str:
        """The cause that rank 0 left before it ended; empty if none, or if its store does not answer any more."""
        with suppress(RuntimeError):
            if self._error is None and self._store.check(["blamed"]):
                return visible(bytes(self._store.get("blamed")).decode(errors="replace"))
        return ""

    def claim_ending(self) -> bool:
        """True if this rank is the first one that ends the job, as far as the store answers."""
        counts: list[int] = []

        def add() -> None:
            with suppress(RuntimeError):
                counts.append(self._store.add("ending", 1))

        claim = threading.Thread(target=add, daemon=True)
        claim.start()
        claim.join(1.0)
        return counts in ([], [1])

    def report(self, failure: Failure) -> None:
        self._store.set(f"failure/{self._rank}", failure.to_json())

    def failures(self) -> list[Failure]:
        found = []
        try:
            for rank in range(self._world_size) if self._error is None else ():
                if self._store.check([f"failure/{rank}"]):
                    found.append(Failure.from_json(self._store.get(f"failure/{rank}").decode()))
        except RuntimeError as error:
            self._error = error
        return found

    def signs(self) -> dict[int, Sign]:
        return {rank: self._with_file(rank, sign) for rank, sign in dict(self._seen).items()}

    def everybody(self) -> dict[int, Sign]:
        self._asks_all = True
        found = self.signs() | self._others | {self._rank: self.sign()}
        return found if len(found) == self._world_size else {}

    def _with_file(self, rank: int, sign: Sign) -> Sign:
        """The sign of a rank that says nothing any more, with the file in which it stands now and not as it said last:
        a call that waits for one may hold Python's lock."""
        local = self.local(rank)
        look = self._files.setdefault(rank, Look(sign.pid, find if local else lambda _: None))
        operation, operation_s = look.observe(sign.beat)
        if look.quiet_s < (IDLE_S if local else sign.heartbeat / 2):
            return sign
        return replace(sign, operation=operation, operation_s=operation_s)

    @property
    def ending(self) -> bool:
        return bool(self._store.check(["ending"]))

    def enter(self, state: State) -> None:
        super().enter(state)
        self._publish()
        self._store.add("finishing" if state is State.FINISHING else "finished", 1)

    def all_finishing(self) -> bool:
        return bool(self._store.add("finishing", 0) >= self._world_size)

    @property
    def somebody_left(self) -> bool:
        return self._left

    def all_finished(self) -> bool:
        return bool(self._store.add("finished", 0) >= self._world_size)
