"""One clock for ranks of several hosts.

Ranks of a host share its clock (`time.perf_counter`). One rank of each other host asks the process that holds the job's
store, which is rank 0, what its clock says: 50 times at the begin, every minute, and at the end. Who asks waits for
nobody but for the answer, in a thread of its own, and no rank waits for it.

    asked at t0, answered with s, heard at t1:   the other clock is s - (t0 + t1) / 2 ahead, give or take (t1 - t0) / 2

Of each 50 the tenth that came back fastest counts, by its median. Half of the slowest of these round trips is how far
that may be wrong. Between two such marks the clocks are taken to drift apart evenly.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from weft.document import Document
from weft.errors import FormatError
from weft.timeline import LATEST_S, Span
from weft.untrusted import read_file, regular
from weft.watch.process import host_name

VERSION = 1
PINGS = 50
EVERY_S = 60.0
"""Between two marks."""
SUFFIX = ".clock.json"
_LEAVE_S = 2.0
"""How long a rank that ends waits for its last mark."""


class Mark(NamedTuple):
    """A comparison of this clock with another one: add `offset_s` for the other, give or take `error_s`."""

    at_s: float
    offset_s: float
    error_s: float


class Offset(NamedTuple):
    """The way from a clock to the common one: at its time `t` add `offset_s + drift * t`, give or take `error_s`."""

    offset_s: float = 0.0
    drift: float = 0.0
    error_s: float = 0.0

    def at(self, seconds: float) -> float:
        """The time of the common clock when this one says `seconds`."""
        return seconds + self.offset_s + self.drift * seconds

    def moved(self, spans: Iterable[Span]) -> list[Span]:
        """The spans on the common clock."""
        if not self.offset_s and not self.drift:
            return list(spans)
        return [replace(each, start_s=self.at(each.start_s), end_s=self.at(each.end_s)) for each in spans]


def measure(
    ask: Callable[[], float], clock: Callable[[], float] = time.perf_counter, pings: int = PINGS
) -> Mark:
    """The offset of the other clock, positive if it is ahead. ``ask`` gets its time; errors of it pass."""
    trips = []
    for _ in range(pings):
        before_s = clock()
        other_s = ask()
        after_s = clock()
        trips.append((after_s - before_s, other_s - (before_s + after_s) / 2, before_s))
    fastest = sorted(trips)[: max(1, pings // 10)]
    return Mark(fastest[0][2], statistics.median(trip[1] for trip in fastest), fastest[-1][0] / 2)


def line(marks: Sequence[Mark]) -> Offset:
    """The offset through the first and the last mark; its error is the largest by which a mark may lie beside.

    >>> line([Mark(0, 10, 0.25), Mark(50, 11.5, 0.25), Mark(100, 12, 0.25)])
    Offset(offset_s=10.0, drift=0.02, error_s=0.75)
    """
    first, last = marks[0], marks[-1]
    drift = (last.offset_s - first.offset_s) / (last.at_s - first.at_s) if last.at_s > first.at_s else 0.0
    offset_s = first.offset_s - drift * first.at_s
    error_s = max(abs(offset_s + drift * mark.at_s - mark.offset_s) + mark.error_s for mark in marks)
    return Offset(offset_s, drift, error_s)


class Keeper:
    """Asks for the time while a job runs, and keeps `host-<name>.clock.json` in the folder of the recording.

    Args:
        folder: Where the ranks of this host record.
        store: The job's store, which has a clock (`weft.launch.store.JobStore`); a connection of its own is made.
        own: Which clock this rank's is: :func:`weft.profiler.clock.clock_identity`.
        number: Which of the job's recordings this is.
    """

    def __init__(self, folder: Path, store: Any, own: bytes, number: int = 1) -> None:
        self._folder, self._store, self._own, self._key = folder, store, own, f"clock/{number}"
        self._marks: list[Mark] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """One last mark."""
        self._stop.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        with suppress(RuntimeError, OSError, ValueError):  # the job ends without rank 0, or the disk is full
            own, store = self._own.hex(), self._store.clone()
            other = store.get(self._key).decode()
            if other == own or store.add(f"{self._key}/{own}", 1) > 1:
                return  # another rank of this host asks
            ends = False
            while not ends:
                self._marks.append(measure(store.time))
                self._write(other)
                ends = self._stop.is_set()
                self._stop.wait(EVERY_S)

    def _write(self, other: str) -> None:
        text = json.dumps({
            "weft": "clock", "version": VERSION, "clock": self._own.hex(), "of": other, "marks": self._marks,
        })  # fmt: skip
        path = self._folder / f"host-{host_name().replace(os.sep, '_')}-{self._own.hex()[:8]}{SUFFIX}"
        beside = path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)


def keep(folder: Path, rank: int, store: Any, own: bytes, number: int = 1) -> Keeper | None:
    """Begin to ask for the time. Rank 0 only says which clock is its own; a store without a clock leaves it at that.

    What an earlier job left in the folder goes. ``number``: which of the job's recordings this is.
    """
    if rank:
        return Keeper(folder, store, own, number) if hasattr(store, "time") else None
    for old in folder.glob(f"host-*{SUFFIX}"):
        old.unlink(missing_ok=True)
    if hasattr(store, "time"):
        store.set(f"clock/{number}", own.hex())
    return None


def offsets(folder: Path) -> dict[bytes, Offset]:
    """For each clock of a recording how it becomes rank 0's; clocks that nobody asked for are not in it.

    Files that cannot be read count as not there.
    """
    found: dict[bytes, Offset] = {}
    for path in sorted(folder.glob(f"host-*{SUFFIX}")) if folder.is_dir() else ():
        with suppress(FormatError, OSError, ValueError):
            own, other, marks = read_file(regular(path), _parse)
            found[other] = Offset()
            found.setdefault(own, line(marks))
    return found


def _parse(text: str) -> tuple[bytes, bytes, list[Mark]]:
    document = Document.parse(text, kind="clock", version=VERSION)
    marks = []
    for record in document["marks"]:
        fields = record.items()
        if len(fields) != 3:
            record.refuse("a time, an offset and its error")
        mark = Mark(*(field.number() for field in fields))
        if not all(abs(value) <= LATEST_S for value in mark) or mark.error_s < 0:
            record.refuse("a time, an offset and its error, in seconds")
        marks.append(mark)
    if not marks:
        document["marks"].refuse("at least one mark")
    return _identity(document["clock"]), _identity(document["of"]), sorted(marks)


def _identity(field: Document) -> bytes:
    text = field.text()
    if len(text) != 32 or not all(letter in "0123456789abcdef" for letter in text):
        field.refuse("32 hexadecimal digits")
    return bytes.fromhex(text)


def common(known: Mapping[bytes, Offset], walls: Mapping[bytes, float]) -> dict[bytes, Offset]:
    """For each clock of a recording how it becomes the first one.

    Args:
        known: What `offsets` found.
        walls: For each clock what to add for the wall clock's time, by :class:`weft.profiler.clock.Clock`. It counts
            where the clocks were not compared; how far it is wrong nobody knows (`error_s` is infinite then).
    """
    first = next(iter(walls))
    base = known.get(first)
    found = {}
    for clock, wall_s in walls.items():
        if clock == first:
            found[clock] = Offset(error_s=base.error_s if base is not None else 0.0)
        elif base is not None and clock in known:
            found[clock] = _through(known[clock], base)
        else:
            found[clock] = Offset(wall_s - walls[first], 0.0, float("inf"))
    return found


def _through(one: Offset, base: Offset) -> Offset:
    """The way from the clock `one` to that of `base`, where both are known by a third.

    With drifts d1, d and offsets o1, o it is t' = (t (1 + d1) + o1 - o) / (1 + d).
    """
    grown = 1.0 + base.drift
    return Offset((one.offset_s - base.offset_s) / grown, (one.drift - base.drift) / grown, one.error_s)


def error_s(found: Iterable[Offset]) -> float:
    """The most that two of these clocks may be apart: the two largest errors together; infinite if one is not known."""
    errors = sorted((each.error_s for each in found), reverse=True)
    return sum(errors[:2]) if len(errors) > 1 else 0.0
