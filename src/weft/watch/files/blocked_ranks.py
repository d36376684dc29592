"""Ranks that are blocked in an operation on a file, and those that wait for them: in the log, and for other commands.

files.json    in the folders of an attempt and of a recording: blocked ranks, their operations, and who waits for them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import FormatError
from weft.terminal_text import visible
from weft.units import format_seconds
from weft.untrusted import TEXT_LIMIT_BYTES, cut, parse_json, read_limited, regular, whole
from weft.watch.heartbeat import Sign, State
from weft.watch.progress_file import write

NAME = "files.json"
REPORT_S = 6.0
"""An operation that takes so long is reported, and again whenever it takes twice as long as then."""
_MOST = 4
"""So many ranks are named at once."""
_LONGEST = 300


@dataclass(frozen=True)
class Standing:
    """Ranks that are blocked in an operation on a file, and ranks that wait for them.

    Attributes:
        operations: The operation of each blocked rank, and since when, in seconds since 1970.
        waiting: The rank for which each other one waits.
    """

    operations: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)

    def of(self, rank: int, now_s: float) -> str:
        """A clause about a rank; empty if there is nothing to say.

        >>> standing = Standing({1: ("reads /data/part-3", 100.0)}, {0: 1})
        >>> standing.of(1, 112.0), standing.of(0, 112.0), standing.of(2, 112.0)
        ('reads /data/part-3 for 12 s', 'waits for rank 1, which reads /data/part-3 for 12 s', '')
        """
        if rank in self.operations:
            operation, since_s = self.operations[rank]
            return f"{operation} for {format_seconds(max(0.0, now_s - since_s))}"
        peer = self.waiting.get(rank, -1)
        return f"waits for rank {peer}, which {self.of(peer, now_s)}" if peer in self.operations else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "ranks": {str(rank): [text, round(since, 1)] for rank, (text, since) in self.operations.items()},
            "waiting": {str(rank): peer for rank, peer in self.waiting.items()},
        }

    @classmethod
    def read(cls, folder: Path) -> Standing:
        """The content of the file in a folder; empty if it has nothing that can be used."""
        try:
            with open(regular(folder / NAME), "rb") as file:
                record = parse_json(read_limited(file, TEXT_LIMIT_BYTES).decode())
            return cls(
                {
                    _rank(rank): (cut(visible(str(text)), _LONGEST), float(since))
                    for rank, (text, since) in record["ranks"].items()
                },
                {_rank(rank): _rank(peer) for rank, peer in record["waiting"].items()},
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, FormatError):
            return cls()


NOTHING = Standing()


def _rank(value: object) -> int:
    number = whole(str(value))
    if number is None:
        raise ValueError(f"{value!r} is no rank")
    return number


class BlockedRanks:
    """Follows the signs of all ranks; whoever sees them calls `observe` a few times a second."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._moves: dict[int, tuple[int, float]] = {}
        self._due: dict[int, float] = {}
        self._last: dict[int, Sign] = {}
        self._written: dict[Path, Standing] = {}
        self.standing = NOTHING

    def observe(self, signs: Mapping[int, Sign]) -> str:
        """The news as text for the log; mostly none."""
        now, wall_s = self._clock(), self._wall()
        for rank, sign in signs.items():
            if self._moves.get(rank, (None, 0.0))[0] != sign.notes:
                self._moves[rank] = (sign.notes, now)
        stand = {
            rank: sign for rank, sign in signs.items() if sign.operation and sign.operation_s >= REPORT_S
        }
        before = self.standing.operations
        operations = {}
        for rank, sign in stand.items():
            text, since_s = before.get(rank, ("", 0.0))
            same = text == sign.operation and abs(wall_s - sign.operation_s - since_s) < REPORT_S
            operations[rank] = (sign.operation, since_s if same else wall_s - sign.operation_s)
        first = max(stand, key=lambda rank: stand[rank].operation_s, default=-1)
        waiting = {}
        for rank, sign in signs.items() if stand else ():
            if rank not in stand and _waits(sign) and now - self._moves[rank][1] >= 1.0:
                waiting[rank] = sign.peer if sign.peer in stand else first
        self.standing = Standing(operations, waiting)
        lines = [
            f"{sign.who(rank)} goes on: it stood still for {format_seconds(sign.operation_s)} ({sign.operation})"
            for rank, sign in self._last.items()
            if rank not in stand and rank in signs
        ]
        due = [rank for rank, sign in stand.items() if sign.operation_s >= self._due.get(rank, 0.0)]
        if due:
            lines.append(_sentence(stand, due, waiting))
        self._due = {
            rank: 2 * sign.operation_s if rank in due else self._due[rank] for rank, sign in stand.items()
        }
        self._last = stand
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes the present state into a folder, if it has changed."""
        if self._written.get(folder, NOTHING) != self.standing:
            self._written[folder] = self.standing
            write(folder, self.standing.as_dict(), NAME)


def _waits(sign: Sign) -> bool:
    """A rank does nothing by itself: it waits for a message, or in a save for what the others have written."""
    return sign.waiting or (sign.state is State.RUNNING and sign.phase == "checkpoint")


def _sentence(stand: Mapping[int, Sign], due: list[int], waiting: Mapping[int, int]) -> str:
    parts = [
        f"{stand[rank].who(rank)} {stand[rank].operation} for {format_seconds(stand[rank].operation_s)}"
        for rank in due[:_MOST]
    ]
    if len(due) > _MOST:
        parts.append(f"and {len(due) - _MOST} more ranks stand so")
    for peer in due[:_MOST]:
        ranks = [str(rank) for rank, other in waiting.items() if other == peer]
        more = f" and {len(ranks) - _MOST} more" if len(ranks) > _MOST else ""
        if ranks:
            parts.append(f"waiting for rank {peer}: rank {', '.join(ranks[:_MOST])}{more}")
    return "; ".join(parts)
