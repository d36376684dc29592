"""The lines of the script that take the time between two steps, and whether they compute there or sleep.

A thread looks 50 times a second at where the main thread is. A line took the time from one look to the next. It
computed as long as the thread had a core. It slept (a disk, the network, `time.sleep`) where it neither had one nor
waited for one. Steps, loaders, optimizers and saves are recorded otherwise, and are left out.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from weft.analysis.run import ScriptLine
from weft.document import Document
from weft.errors import is_own, is_weft
from weft.profiler.recorder import SCRIPT, Recorder
from weft.terminal_text import visible
from weft.untrusted import MOST_RANKS, read_file, whole
from weft.watch.progress_file import write

VERSION = 1
EVERY_S = 0.02
WRITE_S = 5.0
MOST_LINES = 20
Place = tuple[str, int]


class ScriptLines:
    """Samples the main thread of this process until it is closed.

    Args:
        recorder: The recording beside whose files the lines are written.
        path: Their file.
    """

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self._recorder, self._path, self._process = recorder, path, os.getpid()
        self._taken: dict[Place, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """For each line its seconds, and of the looks that were wholly between steps those asleep and computing."""
        self._stop = threading.Event()
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="weft-script-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what was seen, and ends; in a forked process there is nothing to end."""
        self._stop.set()
        if os.getpid() == self._process:
            self._thread.join()

    def _run(self) -> None:
        assert self._main.ident is not None
        clock = time.pthread_getcpuclockid(self._main.ident)
        before = wrote_s = time.perf_counter()
        cpu_s, queued_s = time.clock_gettime(clock), self._queued_s()
        while not self._stop.wait(EVERY_S):
            now = time.perf_counter()
            now_cpu_s, now_queued_s = time.clock_gettime(clock), self._queued_s()
            ended_s = self._recorder.between_steps
            place = None if ended_s is None else own_place(sys._current_frames().get(self._main.ident))
            if place is not None and ended_s is not None:
                taken, computed_s = self._taken[place], now_cpu_s - cpu_s
                taken[0] += max(0.0, now - max(before, ended_s))
                if ended_s <= before:  # else a part of that was the step's
                    taken[1] += max(0.0, now - before - computed_s - (now_queued_s - queued_s))
                    taken[2] += computed_s
            before, cpu_s, queued_s = now, now_cpu_s, now_queued_s
            if now - wrote_s > WRITE_S:
                wrote_s = now
                self._write()
        self._write()

    def _queued_s(self) -> float:
        """Seconds for which the main thread has waited for a core so far; 0 where the system does not say."""
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/self/task/{self._main.native_id}/schedstat").read_text()
            return int(text.split()[1]) * 1e-9
        return 0.0

    def _write(self) -> None:
        lines = []
        for (file, line), (taken_s, slept_s, computed_s) in sorted(
            self._taken.items(), key=lambda each: -each[1][0]
        )[:MOST_LINES]:
            asleep_s = taken_s * slept_s / (slept_s + computed_s) if slept_s + computed_s else 0.0
            lines.append(
                {"file": file, "line": line, "text": linecache.getline(file, line).strip()[:200],
                 "asleep_s": round(asleep_s, 4), "computing_s": round(taken_s - asleep_s, 4)}
            )  # fmt: skip
        write(self._path.parent, {"weft": "script", "version": VERSION, "lines": lines}, self._path.name)


def own_place(frame: FrameType | None) -> Place | None:
    """The file and line of the innermost frame that is no library's; None where weft itself is nearer."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_weft(file):
            return None
        if is_own(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def watch(recorder: Recorder, rank: int) -> Callable[[], None]:
    """From now on the lines are sampled; the result ends that. Nothing is sampled where threads have no clocks."""
    path = recorder.folder / f"rank{rank}{SCRIPT}"
    path.unlink(missing_ok=True)
    return ScriptLines(recorder, path).close if hasattr(time, "pthread_getcpuclockid") else lambda: None


def read_script_lines(path: Path) -> tuple[int, tuple[ScriptLine, ...]]:
    """A rank and its lines, the one that took most first.

    Raises:
        FormatError: The file cannot be read; the error names the fault by its path.
    """

    def parse(text: str) -> tuple[ScriptLine, ...]:
        document = Document.parse(text, kind="script", version=VERSION)
        return tuple(
            ScriptLine(
                visible(each["file"].text()), each["line"].whole(), visible(each["text"].text()),
                each["asleep_s"].number(), each["computing_s"].number(),
            )
            for each in document["lines"]
        )  # fmt: skip

    number = path.name.removeprefix("rank").removesuffix(SCRIPT)
    return whole(number, MOST_RANKS) or 0, read_file(path, parse)
