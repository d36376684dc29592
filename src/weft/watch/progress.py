"""One line about a loop of steps: how far it is, how fast, who waits.

    step 120 of 1000 ##........ 1:02 left | 35.2 ms | 910 samples/s | idle 12 % 18 % | 1.2 GiB | loss 2.31

On a terminal it is written over itself, and goes when something else is written; elsewhere a line comes every ten
seconds. It is plain text that ends with a carriage return: the launcher knows that and keeps lines of ranks apart.

Values that a script says are one line of JSON each time: ``{"step": 3, "time": 1700000000.0, "values": {...}}``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from weft.errors import UsageError
from weft.terminal_text import visible
from weft.units import format_bytes, format_seconds
from weft.untrusted import shown_path, shown_text

VARIABLE = "WEFT_PROGRESS"
"""Variable by which the launcher says how: one of :data:`EVERY_S`, or `off`."""
EVERY_S: Mapping[str, float] = {"terminal": 0.25, "plain": 10.0}
"""Seconds between two lines."""
FIRST_S = 1.0
"""A loop that is over sooner shows nothing."""
BAR = 10
SHOWN = 3
"""So many values of the script are in the line."""


class Ranks(NamedTuple):
    """The state of a pipeline's ranks in their last step: shares of it in which they had nothing to run, and the
    memory of the one that has most, bytes."""

    idle: Sequence[float] = ()
    memory_bytes: int = 0


class Progress:
    """Shows how a loop goes on; see the module.

    Args:
        how: `terminal` or `plain`.
        write: Takes text for the terminal or file.
        width: Columns of the terminal.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        how: str,
        write: Callable[[str], object],
        width: int = 80,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if how not in EVERY_S:
            raise UsageError(
                f'{VARIABLE} is "{shown_text(how)}": it must be {", ".join(EVERY_S)} or off; weft run sets it'
            )
        self.total: int | None = None
        self._how, self._write, self._width, self._clock = how, write, width, clock
        self._began = self._shown = clock()
        self._steps = self._steps_then = self._samples = 0
        self._values: dict[str, float] = {}
        self._took_s = self._rate = 0.0
        self._known: tuple[Ranks, Mapping[str, float]] | None = None

    def begin(self, total: int | None) -> None:
        """A loop of so many steps begins."""
        self.total, self._steps, self._steps_then, self._samples = total, 0, 0, 0
        self._began = self._shown = self._clock()

    def note(self, values: Mapping[str, float]) -> None:
        """Values of the script, for the next line."""
        self._values |= values

    def step(
        self,
        samples: int = 0,
        ranks: Callable[[], Ranks] = Ranks,
        loss: Callable[[], float | None] = lambda: None,
    ) -> None:
        """A step has ended; what takes time to find out is asked only if it is shown."""
        now = self._clock()
        self._steps += 1
        self._samples += samples
        if now - self._began < FIRST_S or now - self._shown < EVERY_S[self._how]:
            return
        self._took_s = (now - self._shown) / (self._steps - self._steps_then)
        self._rate = self._samples / (now - self._shown)
        found = loss()
        self._known = ranks(), self._values if self._values or found is None else {"loss": found}
        self._show("\n" if self._how == "plain" else "\r")
        self._shown, self._steps_then, self._samples = now, self._steps, 0

    def close(self) -> None:
        """The loop is over: the last line stays."""
        if self._known is not None and self._how == "terminal":
            self._show("\n")
        self._known = None

    def _show(self, end: str) -> None:
        line = self._text()
        self._write((line if self._how == "plain" else line[: self._width - 1]) + end)

    def _text(self) -> str:
        assert self._known is not None
        ranks, values = self._known
        parts = [self._where(), format_seconds(self._took_s)]
        if self._rate:
            parts.append(f"{self._rate:,.0f} samples/s")
        if ranks.idle:
            parts.append("idle " + " ".join(f"{share:.0%}" for share in ranks.idle))
        if ranks.memory_bytes:
            parts.append(format_bytes(ranks.memory_bytes))
        parts += [f"{visible(str(name))} {value:.4g}" for name, value in list(values.items())[-SHOWN:]]
        return " | ".join(parts)

    def _where(self) -> str:
        if not self.total:
            return f"step {self._steps}"
        full = min(BAR, BAR * self._steps // self.total)
        left_s = self._took_s * max(0, self.total - self._steps)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return f"step {self._steps} of {self.total} {'#' * full}{'.' * (BAR - full)} {left} left"


def on_stderr(how: str) -> Progress:
    """The line on the standard error of this process."""

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return Progress(how, write, shutil.get_terminal_size().columns)


def open_progress(rank: int, environ: Mapping[str, str]) -> Progress | None:
    """The line of the first rank, if the launcher wants one."""
    how = environ.get(VARIABLE, "off")
    return on_stderr(how) if rank == 0 and how != "off" else None


class ValueFile:
    """A file of one job in a folder; made with the first values.

    Raises:
        UsageError: The folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self.path.open("x", encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"values cannot be written to {shown_path(folder)}: {error.strerror}. Name another folder: weft run "
                "--log-dir FOLDER, or the setting log_dir"
            ) from error

    def add(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write them now, so that they are there if the job is killed; what is no finite number is written as text."""
        safe = {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in values.items()
        }
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), "values": safe}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()
