"""Ranks that save together meet in the job's store, not in a collective: nobody can be left waiting in one.

Every rank of the first pipeline has to come; ranks of its copies may. A rank that does not come is noticed by
what it does instead: it has ended, it is steps ahead, or it waits for somebody else and gets nowhere. The first
rank leads: it says who takes part, collects what each one reports, and sends all of them how it ended.

The keys of a meeting carry the step and how often the rank has met in it, so a rank that skips a meeting is in
time for the next one. A meeting uses a connection of its own and may go on in a thread beside the training.

What the store holds of a meeting is removed when all who took part have heard how it ended. One key stays for all of
them, the name of the last meeting that has begun: it shows a rank that comes later that there is nothing to wait for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import StallError, UsageError
from weft.watch.heartbeat import Sign, State

_PAUSE_S = 0.02
_LOOK_S = 0.5
_HEAR_S = 5.0
"""How long the leader waits until all have heard the end; then it leaves the meeting's keys in the store."""
_LAST = "checkpoint/last"
STUCK_S = 10.0
"""A rank that has waited so long for another, without any progress, is taken to wait for a rank of this meeting."""


class Meeting:
    """One save, as one rank sees it.

    Args:
        store: The job's store: ``set(key, text)``, ``get(key)``, ``check([key])``, ``delete_key(key)``.
        name: The same on all ranks, for this meeting only.
        rank: This rank.
        required: The ranks that have to come, the leader first.
        optional: The ranks that may come.
        step: How many steps this rank has run.
        signs: What every rank shows of itself, as far as this one can see.
        what: The call, for messages.
        timeout_s: After how long without any news a wait ends.
        everybody: Whether copies of the pipeline have to come too; for messages.
    """

    def __init__(
        self, store: Any, name: str, rank: int, required: Sequence[int], optional: Sequence[int], step: int,
        signs: Callable[[], Mapping[int, Sign]], what: str, timeout_s: float,
        everybody: bool = False,
    ) -> None:  # fmt: skip
        self.store, self.name, self.rank = store, name, rank
        self.required, self.optional = list(required), list(optional)
        self.step, self.signs, self.what, self.timeout_s = step, signs, what, timeout_s
        self.everybody = everybody
        self.came = [rank]

    @property
    def leads(self) -> bool:
        return self.rank == self.required[0]

    def arrive(self, text: str) -> dict[int, str]:
        """Come to the meeting with a text. The leader gets the texts of all by rank, the others the leader's."""
        self.store.set(self._key("here", self.rank), text)
        if not self.leads:
            return {self.required[0]: self._wait(self._key("begin"), self.required[0])}
        missing, came = [*self.required, *self.optional], {}
        watch = {rank: _Absent(self.step) for rank in missing}
        last_look = started = time.monotonic()
        while missing:
            for rank in [rank for rank in missing if self._has("here", rank)]:
                came[rank] = bytes(self.store.get(self._key("here", rank))).decode()
                missing.remove(rank)
            now = time.monotonic()
            if missing and now - last_look > _LOOK_S:
                last_look = now
                missing = self._without_absent(missing, watch, now)
                if now - started > self.timeout_s and missing:
                    self._miss(
                        {rank: f"was not heard of for {self.timeout_s:g} s" for rank in missing}, list(came)
                    )
            if missing:
                time.sleep(_PAUSE_S)
        self.came = sorted(came)
        return came

    def _without_absent(self, missing: list[int], watch: dict[int, _Absent], now: float) -> list[int]:
        seen = self.signs()
        away = {rank: why for rank in missing if (why := watch[rank].judge(seen.get(rank), now))}
        away = {rank: why for rank, why in away.items() if not self._has("here", rank)}
        needed = {rank: why for rank, why in away.items() if rank in self.required}
        if needed:
            came = [rank for rank in (*self.required, *self.optional) if self._has("here", rank)]
            self._miss(needed, came)
        return [rank for rank in missing if rank not in away]

    def _miss(self, absent: Mapping[int, str], came: Sequence[int]) -> None:
        whom = ", ".join(f"rank {rank} {why}" for rank, why in absent.items())
        by = "rank " + ", ".join(map(str, sorted(came)))
        text = (
            f"{self.what} was called by {by} only: {whom}. Call it on every rank"
            + (", " if self.everybody else ", or on every rank with weft.rdp_rank() == 0, ")
            + "and not on one rank of a pipeline alone"
        )
        if self.leads:
            self.store.set(self._key("begin"), json.dumps({"error": text}))
        raise UsageError(text)

    def begin(self, content: Mapping[str, Any]) -> None:
        """Send all, as the leader, what they need to begin."""
        self.store.set(self._key("begin"), json.dumps(content))
        self.store.set(_LAST, self.name)

    def report(self, text: str) -> None:
        """Send the leader what this rank did."""
        self.store.set(self._key("report", self.rank), text)

    def reports(self, ranks: Sequence[int]) -> dict[int, str]:
        """The reports of some ranks, for which the leader waits."""
        return {rank: self._wait(self._key("report", rank), rank, leaving=False) for rank in ranks}

    def end(self, content: Mapping[str, Any]) -> None:
        """Send all, as the leader, how the meeting ended."""
        self.store.set(self._key("end"), json.dumps(content))

    def ended(self) -> dict[str, Any]:
        """The end of the meeting, as the leader says; waits for that."""
        found: dict[str, Any] = json.loads(self._wait(self._key("end"), self.required[0], leaving=False))
        return found

    def part(self, came: Sequence[int] | None = None) -> None:
        """Leave the meeting, having heard everything; the last that leave remove the meeting's keys from the store.

        ``came``: the ranks that took part, as the leader said.
        """
        if not self.leads:
            if came is None or self.rank in came:
                self.store.set(self._key("heard", self.rank), "")
            else:
                self.store.delete_key(self._key("here", self.rank))
            return
        deadline = time.monotonic() + min(_HEAR_S, self.timeout_s)
        while not all(self._has("heard", rank) for rank in self.came if rank != self.rank):
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_S)
        for rank in self.came:
            for kind in ("here", "report", "heard"):
                self.store.delete_key(self._key(kind, rank))
        self.store.delete_key(self._key("begin"))
        self.store.delete_key(self._key("end"))

    def _is_over(self) -> bool:
        """True if the meeting has begun without this rank, or even ended."""
        if not self.store.check([_LAST]):
            return False
        last = bytes(self.store.get(_LAST)).decode()
        later = tuple(map(int, last.split("."))) >= tuple(map(int, self.name.split(".")))
        return later and not self.store.check([self._key("begin")])

    def _wait(self, key: str, peer: int, leaving: bool = True) -> str:
        """The text of a key that ``peer`` sets. ``leaving``: whether the peer may turn out not to come at all."""
        started = last_look = time.monotonic()
        watch = _Absent(self.step)
        while not self.store.check([key]):
            if leaving and self._is_over():
                return json.dumps({"ranks": []})
            now = time.monotonic()
            if now - last_look > _LOOK_S:
                last_look = now
                why = (
                    watch.judge(self.signs().get(peer), now)
                    if leaving and not self._has("here", peer)
                    else ""
                )
                if why and not self._has("here", peer):
                    came = [rank for rank in (*self.required, *self.optional) if self._has("here", rank)]
                    self._miss({peer: why}, came)
                if now - started > self.timeout_s:
                    raise StallError(f"rank {peer} did not answer in {self.what} for {self.timeout_s:g} s")
            time.sleep(_PAUSE_S)
        return bytes(self.store.get(key)).decode()

    def _has(self, kind: str, rank: int) -> bool:
        return bool(self.store.check([self._key(kind, rank)]))

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"checkpoint/{self.name}/{kind}" + ("" if rank is None else f"/{rank}")


class _Absent:
    """Judges by a rank's signs, one after the other, whether the rank is not going to come."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.notes = -1
        self.since = 0.0

    def judge(self, sign: Sign | None, now: float) -> str:
        """Why the rank is not going to come; empty as long as it may come."""
        if sign is None or sign.state is State.ABSENT:
            return ""
        if sign.state is not State.RUNNING:
            return "has come to its end without it"
        if sign.step is not None and sign.step > self.step:
            return f"went on without it ({sign.where()})"
        if not sign.waiting or sign.notes != self.notes:
            self.notes, self.since = sign.notes, now
            return ""
        return f"waits for others without it ({sign.where()})" if now - self.since > STUCK_S else ""
