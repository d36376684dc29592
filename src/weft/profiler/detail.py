"""Of which steps the spans are kept. What each step took is kept of all of them.

    all                                     every step
    first 20, every 10, 100-200, outliers   the first 20, one in 10 later, those from 100 to 200, and those that took
                                            more than 1.5 times the median of the steps before

All ranks follow the same steps, but for outliers, which each finds for itself. One in 10 is one of each ten, at another
place each time: the multiples of 10 would have all that a script does every 50 steps, or nothing of it.

A file in the folder of a recording changes that while the job runs:

    {"record_steps": "1000-1010"}    in control.json: from the next step on, on every rank that sees the folder
"""

from __future__ import annotations

import logging
import os
import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from weft.checks import STEPS, Steps
from weft.document import Document
from weft.errors import ConfigError, FormatError
from weft.untrusted import parse_json, read_text, shown

OUTLIER = 1.5
MEDIAN_OF = 64
"""So many steps give the running median."""
LEAST = 8
"""With fewer no step is an outlier."""
SPANS_LIMIT_BYTES = 28 << 20
"""A file of spans grows so far by one in K and by outliers: with the lines of 100,000 steps that is below 50 MB."""
REPORT = "first 20, every 10, outliers"
"""What a report needs."""
_LOG = logging.getLogger("weft")


@dataclass
class Detail:
    """Of which steps the spans are kept.

    Attributes:
        first: So many at the begin.
        every: One of each so many, at another place each time; 0 is none.
        ranges: From and to, both of them too.
        outliers: Those that took much longer than others.
        everything: All of them.
    """

    first: int = 0
    every: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    outliers: bool = False
    everything: bool = False
    _taken: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF), repr=False)
    _full: bool = False

    def keeps(self, step: int, written_bytes: int) -> bool:
        """True if the spans of a step are written, whatever it takes; `written_bytes`: what the file has."""
        if self.everything or any(low <= step <= high for low, high in self.ranges):
            return True
        if written_bytes >= SPANS_LIMIT_BYTES:
            if not self._full:
                self._full = True
                _LOG.warning(
                    "the recording has %d MiB of spans: from step %d on it keeps only what each step took, and the "
                    "steps that are asked for by their numbers", SPANS_LIMIT_BYTES >> 20, step,
                )  # fmt: skip
            return False
        return step <= self.first or (
            self.every > 0 and step % self.every == _place(step // self.every, self.every)
        )

    def note(self, took_s: float) -> bool:
        """A step took so long, with what lay behind it; whether its spans may be left out."""
        taken = self._taken
        slow = len(taken) >= LEAST and took_s > OUTLIER * statistics.median(taken)
        taken.append(took_s)
        return self._full or not (self.outliers and slow)


def _place(block: int, every: int) -> int:
    """The step of a block that is kept, from 0: multiples of the golden section are spread evenly and meet no period.

    >>> [_place(block, 10) for block in range(1, 9)]
    [6, 2, 8, 4, 0, 7, 3, 9]
    """
    return (block * 2654435769 % 2**32) * every >> 32


EVERYTHING = Detail(everything=True)


def parse_detail(text: str) -> Detail:
    """The steps to record in detail, from their text.

    Raises:
        ConfigError: It is none.

    >>> parse_detail("first 20, every 10, 100-200").ranges
    ((100, 200),)
    """
    if not Steps().accepts(text):
        raise ConfigError(f"{shown(text)} says not which steps: it must be {Steps()}")
    found = Detail()
    for part in text.split(","):
        match = STEPS.fullmatch(part.strip())
        assert match is not None
        first, every, low, high = (int(digits or 0) for digits in match.groups()[:4])
        found.first, found.every = max(found.first, first), every or found.every
        if match[3]:
            found.ranges += ((low, high),)
        found.outliers |= bool(match[5])
        found.everything |= bool(match[6])
    return found


NAME = "control.json"
EVERY_S = 1.0
LIMIT_BYTES = 1 << 16


class Control:
    """Looks at the file, at most once in `EVERY_S`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._looked_s = float("-inf")
        self._seen = self._stamp()

    def look(self, now_s: float) -> Detail | None:
        """The file's request, if it has changed; a file that means nothing is reported and left alone."""
        if now_s - self._looked_s < EVERY_S:
            return None
        self._looked_s = now_s
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        if stamp is None:
            return None
        try:
            document = Document(parse_json(read_text(self._path, LIMIT_BYTES), "it is not JSON"))
            document.only("record_steps")
            detail = parse_detail(document["record_steps"].text())
        except (ConfigError, FormatError) as error:
            _LOG.warning('%s is left alone: %s. Write {"record_steps": "100-200"}, say', self._path, error)
            return None
        _LOG.info("the recording goes on with the steps: %s", document["record_steps"].text())
        return detail

    def _stamp(self) -> tuple[int, int] | None:
        """A value that changes when somebody writes the file; None without one."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size
