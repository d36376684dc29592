"""Who holds a job up, judged from the signs of its ranks. Pure: the clock is handed in.

    frozen    no beat for `heartbeat` seconds: stopped, or its interpreter is locked; a file that does not answer is
              another thing
    left      a rank came to its end while another one still waits for it
    stalled   somebody waits, or all have come to their end, and no rank turned to anything new for `stall` seconds;
              for `CALL_SECONDS` if a rank is in a call that the one which waits for it has left out

Time in which the judge itself did not run (the machine slept, its output was blocked) counts for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.watch.heartbeat import Sign, State

LEAVE_SECONDS = 2.0
"""How long a message of a rank that came to its end may still be on its way."""
RETURN_SECONDS = 8.0
"""Seconds that a rank may need from `weft.shutdown` to the next `weft.init`, where others are already."""
CALL_SECONDS = 30.0
"""For how long what ranks have sent in a call of all ranks may still be on its way, while all of them wait."""
HANDLER_SECONDS = 5.0
"""Seconds for which a rank may handle an exception while all others wait for it."""
HANDLER_NOTES = 8
"""Times that it may turn to something new meanwhile."""

A_STEP = "is a step under `if weft.rank() == 0`, or has its loader fewer batches?"


@dataclass(frozen=True)
class Verdict:
    """Why a job has to end.

    Attributes:
        kind: frozen, left or stalled.
        ranks: Who is to blame; the first of them is named first.
        text: What happened, for people.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str


class Judge:
    """Watches the signs of the ranks; call `observe` a few times in each of the shortest limits.

    Args:
        sees_all: The signs are those of all ranks. Otherwise nothing is concluded from who is missing.
    """

    def __init__(self, sees_all: bool = True) -> None:
        self._sees_all = sees_all
        self._clock = 0.0
        self._last: float | None = None
        self._beats: dict[int, tuple[int, float]] = {}
        self._notes: dict[int, tuple[tuple[int, State], float]] = {}

    def observe(self, now: float, signs: Mapping[int, Sign]) -> Verdict | None:
        """The verdict on `signs` as seen `now`, in seconds; None while all is well."""
        alive = {rank: sign for rank, sign in signs.items() if sign.state is not State.ABSENT}
        self._advance(now, alive)
        for rank, sign in alive.items():
            if self._beats.get(rank, (None, 0.0))[0] != sign.beat:
                self._beats[rank] = (sign.beat, self._clock)
            progress = (sign.notes, sign.state)
            if self._notes.get(rank, (None, 0.0))[0] != progress:
                self._notes[rank] = (progress, self._clock)
        running = {rank: sign for rank, sign in alive.items() if sign.state is not State.FINISHED}
        return self._frozen(running) or self._left(running) or self._stalled(running)

    def _advance(self, now: float, signs: Mapping[int, Sign]) -> None:
        """The judge's own clock runs at most a quarter of the shortest limit between two looks."""
        if self._last is not None:
            limits = [limit for sign in signs.values() for limit in (sign.heartbeat, sign.stall) if limit > 0]
            self._clock += min(now - self._last, min(limits, default=1.0) / 4)
        self._last = now

    def _silent(self, rank: int) -> float:
        return self._clock - self._beats[rank][1]

    def _idle(self, rank: int) -> float:
        return self._clock - self._notes[rank][1]

    def _frozen(self, signs: Mapping[int, Sign]) -> Verdict | None:
        frozen = [
            rank
            for rank, sign in signs.items()
            if sign.heartbeat > 0 and self._silent(rank) > sign.heartbeat and not sign.operation
        ]
        if not frozen:
            return None
        frozen.sort(key=self._silent, reverse=True)
        parts = [
            f"{sign.who(rank)} is frozen: no heartbeat for {self._silent(rank):.1f} s{sign.last_seen()}"
            for rank, sign in ((rank, signs[rank]) for rank in frozen)
        ]
        return Verdict("frozen", tuple(frozen), "; ".join(parts))

    def _left(self, signs: Mapping[int, Sign]) -> Verdict | None:
        left = [rank for rank, sign in signs.items() if sign.state is State.FINISHING]
        rest = [rank for rank, sign in signs.items() if sign.state is State.RUNNING]
        if not left:
            return None
        since = min(map(self._idle, left))  # a rank may wait for long, and get its message only now
        stuck = [
            rank
            for rank in rest
            if signs[rank].waiting and min(self._idle(rank), since) > _patience(signs[rank])
        ]
        named = [rank for rank in stuck if signs[rank].peer in left]
        if not named and not (stuck and len(stuck) == len(rest) and self._sees_all):
            return None
        waiter = (named or stuck)[0]
        gone = signs[waiter].peer if named else left[0]
        assert gone is not None
        return Verdict("left", (gone,), leaving_text(gone, signs[gone], {waiter: signs[waiter]}))

    def _stalled(self, signs: Mapping[int, Sign]) -> Verdict | None:
        rest = {rank: sign for rank, sign in signs.items() if sign.state is State.RUNNING}
        if not rest:  # they wait for each other's last words
            rest = {
                rank: replace(sign, state=State.RUNNING, phase="barrier", module="the job's end")
                for rank, sign in signs.items()
            }
        if not self._sees_all or not any(sign.waiting for sign in rest.values()):
            return None
        alone = _alone(rest) if len(rest) == len(signs) else None
        most = float("inf") if alone is None else CALL_SECONDS
        if not all(
            0 < sign.stall and min(sign.stall, most) < self._idle(rank) for rank, sign in signs.items()
        ):
            return None
        behind = [rank for rank, sign in rest.items() if not sign.waiting]
        suspects = behind or sorted(rest, key=lambda rank: (rank != alone, rest[rank].step or 0))
        parts = [
            f"{rest[rank].who(rank)} in {rest[rank].where() or 'its start'} for {self._idle(rank):.1f} s"
            for rank in [*suspects, *(rank for rank in rest if rank not in suspects)]
        ]
        head = "no rank gets on" if behind else "all ranks wait for each other"
        calls = dict.fromkeys(sign.call for sign in rest.values())
        advice = f". {on_every_rank(next(filter(None, calls)))}" if len(calls) > 1 else ""
        return Verdict("stalled", tuple(suspects), f"{head}: {'; '.join(parts)}{advice}")


def _alone(signs: Mapping[int, Sign]) -> int | None:
    """The rank in a call of all ranks that another one has left out, which is in a later step and waits for it there;
    None as long as anybody works."""
    if not all(sign.waiting for sign in signs.values()):
        return None
    for sign in signs.values():
        other = signs.get(-1 if sign.peer is None else sign.peer)
        if other is not None and other.call and (sign.step or 0) > (other.step or 0):
            return sign.peer
    return None


def on_every_rank(call: str) -> str:
    """Advice where a rank is alone in a call."""
    return f"Call {call} on every rank, not under `if weft.rank() == 0`"


def _patience(sign: Sign) -> float:
    return RETURN_SECONDS if sign.module == "weft.init" else LEAVE_SECONDS


class Handler:
    """Finds that this rank stands still in code that handles an exception (``except``, ``finally``), and holds up the
    others: a barrier, or a save, of which the others know nothing. Pure, as `Judge`.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._error: BaseException | None = None
        self._notes = 0
        self._seen: tuple[int, ...] = ()
        self._since = 0.0

    def observe(self, now: float, error: BaseException | None, signs: Mapping[int, Sign]) -> bool:
        """True if ``error``, which this rank handles now, is what ends the job."""
        running = {rank: sign for rank, sign in signs.items() if sign.state is State.RUNNING}
        own = running.get(self._rank)
        if own is None or not isinstance(error, Exception):
            self._error = None
            return False
        if error is not self._error:
            self._error, self._notes, self._seen = error, own.notes, ()
        seen = tuple(sign.notes for sign in running.values())
        if seen != self._seen:
            self._seen, self._since = seen, now
        others = [sign for rank, sign in running.items() if rank != self._rank]
        elsewhere = any((sign.phase, sign.module) != (own.phase, own.module) for sign in others)
        return (
            now - self._since > HANDLER_SECONDS
            and own.notes - self._notes <= HANDLER_NOTES  # else the script runs in a handler
            and all(sign.waiting for sign in others)
            and elsewhere
        )


def leaving_text(rank: int, sign: Sign, others: Mapping[int, Sign]) -> str:
    """That a rank came to its end too early.

    >>> leaving_text(1, Sign(step=3), {0: Sign(step=3, phase="collective", module="state_dict()")})[:69]
    'rank 1 left at step 3 while rank 0 still needs it: step 3, collective'
    """
    at = f" at {sign.which_step()}" if sign.step is not None else ""
    named = [f"rank {other}" for other in others]
    needs = "still needs it" if len(named) == 1 else "still need it"
    waiter = next((seen for seen in others.values() if seen.where()), Sign())
    doing = f": {waiter.where()}" if waiter.where() else ""
    if waiter.call:
        advice = f". {on_every_rank(waiter.call)}"
    elif sign.step is not None and (waiter.step or 0) > sign.step:
        advice = f". Rank {rank} has no {waiter.which_step()}: {A_STEP}"
    elif waiter.phase == "collective":
        advice = f". Rank {rank} makes other calls: {A_STEP}"
    else:
        advice = ""
    return f"{sign.who(rank)} left{at} while {' and '.join(named)} {needs}{doing}{advice}"
