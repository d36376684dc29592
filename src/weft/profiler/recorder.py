"""Writes what a rank does into a file, as it happens.

A span costs a fraction of a microsecond. It joins a queue, which needs no lock; when that holds a block of
spans, and at the end of each step, they are packed into a buffer that was made beforehand and go to the
file. So a process that dies loses at most its last step, whatever kills it. An error of the file (a full
disk) ends the recording, never the training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from weft.analysis.run import Facts
from weft.errors import UsageError
from weft.profiler.clock import Clock
from weft.profiler.detail import EVERYTHING, Control, Detail
from weft.profiler.device import DeviceTimes, Event, Moment
from weft.profiler.facts import SUFFIX as FACTS
from weft.profiler.format import CONTENT_CODES, HEADER_BYTES, KIND_CODES, MARK, RECORD, Header
from weft.profiler.steps import NOTHING, Book, Spent
from weft.profiler.steps import SUFFIX as STEPS
from weft.timeline import MESSAGES, WORK
from weft.watch import failed

BLOCK_RECORDS = 2048
SUFFIX = ".spans"
SCRIPT = ".script.json"
"""The lines of the script that take time between steps, see `weft.profiler.host.script_lines`."""
MOST_HELD = 1 << 16
"""So many spans of a step that may be left out wait in memory, until it is known how long it took."""
KEPT = 8
"""A message may be so many steps behind what it belongs to."""
ON_DEVICE = frozenset((*WORK, "optimizer", "reduce", "copy", "tensor"))
"""What goes on on a GPU after the host has handed it over."""
_PACK = RECORD.pack_into
_LOG = logging.getLogger("weft")


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank{rank}{SUFFIX}"


class Recorder:
    """One rank's file of spans, and what is written beside it.

    Attributes:
        book: Keeps a line of every step.
        facts: What the rank is, as it was written last.
        detail: Of which steps the spans are kept.
        control: The file that changes that.
        device: Times work by events of a GPU.
        inside: The kinds of spans that have begun and count once, however deep they are nested.
        undo: What the end of the recording calls.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     recorder = Recorder.open(Path(folder), rank=0, ranks=1)
    ...     recorder.add("F", 1, 0, 1.0, 1.5)
    ...     recorder.close()
    ...     path_of(Path(folder), 0).stat().st_size
    96
    """

    def __init__(self, path: Path, header: Header, block_records: int = BLOCK_RECORDS) -> None:
        self._path = path
        self._block = block_records
        self._buffer = bytearray(block_records * RECORD.size)
        self._spans: deque[tuple[float | int, ...]] = deque()
        self._lock = threading.Lock()
        self.folder, self.clock = path.parent, Clock(header.clock, header.offset_s)
        self.book: Book | None = None
        self.facts: Facts | None = None
        self.control: Control | None = None
        self.device: DeviceTimes | None = None
        self.inside: set[str] = set()
        self.undo: list[Callable[[], None]] = []
        self.detail: Detail = EVERYTHING
        self._keeps = True
        self._kept: deque[int] = deque(maxlen=KEPT)
        self._opened_s: float | None = None
        self._step, self._step_s = -1, 0.0
        self._ended_s: float | None = None
        try:
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
            os.write(self._file, header.pack())
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._written = HEADER_BYTES

    @classmethod
    def open(cls, folder: Path, rank: int, ranks: int, clock: Clock | None = None) -> Recorder:
        """Begin the file of ``rank`` in ``folder``, which is made if need be; a recording that is there is replaced.

        Raises :class:`UsageError` where nothing can be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        if rank == 0:
            failed.forget(folder)
            for suffix in (SUFFIX, STEPS, FACTS, SCRIPT):
                for old in folder.glob(f"rank*{suffix}"):
                    number = old.name[len("rank") : -len(suffix)]
                    if number.isdecimal() and int(number) >= ranks:
                        old.unlink(missing_ok=True)
        identity, offset_s = clock or Clock.here()
        return cls(path_of(folder, rank), Header(rank, ranks, offset_s, identity))

    # --- steps ----------------------------------------------------------------------------------------------

    def open_step(self, at_s: float | None = None) -> None:
        """The next step begins now, or has begun then, also if it gets its number later."""
        if self._opened_s is None:
            self._opened_s = time.perf_counter() if at_s is None else at_s

    def drop_step(self) -> None:
        """The step that was opened does not come: it has failed before it got its number."""
        self._opened_s = None

    @property
    def between_steps(self) -> float | None:
        """When the last step ended; None while one runs, before the first, and while something else is recorded."""
        return self._ended_s if self._opened_s is None and not self.inside else None

    def begin_step(self, step: int, evaluates: bool = False) -> None:
        """A step begins; it began where `open_step` was called. What lies behind it is kept as its detail says."""
        now = time.perf_counter()
        start_s, self._opened_s = now if self._opened_s is None else self._opened_s, None
        self._ended_s = None
        spent = self.book.spent() if self.book is not None else NOTHING
        if self.device is None:
            self._begin_step(step, evaluates, spent, start_s)
            return
        self.device.tie()
        self.device.own(
            start_s, start_s, lambda begin_s, _: self._begin_step(step, evaluates, spent, begin_s)
        )

    def _begin_step(self, step: int, evaluates: bool, spent: Spent, start_s: float) -> None:
        if self._step >= 0:
            usual = self.detail.note(start_s - self._step_s)
            self._settle(usual and not self._keeps)
        self._step, self._step_s = step, start_s
        changed = self.control.look(time.perf_counter()) if self.control is not None else None
        self.detail = changed or self.detail
        self._keeps = self.detail.keeps(step, self._written)
        if self._keeps:
            self._kept.append(step)
        if self.book is not None:
            self.book.begin(step, start_s, evaluates, spent)

    def end_step(self, samples: int = 0, memory_bytes: int = 0) -> None:
        """The step that began has come to its end."""
        self._opened_s = None
        self._ended_s = now = time.perf_counter()
        spent = self.book.spent() if self.book is not None else NOTHING
        if self.device is None:
            self._end_step(samples, memory_bytes, spent, now)
            return
        self.device.work(now, now, lambda _, end_s: self._end_step(samples, memory_bytes, spent, end_s))

    def _end_step(self, samples: int, memory_bytes: int, spent: Spent, end_s: float) -> None:
        if self._step < 0:
            return
        if self.book is not None:
            self.book.end(end_s, samples, memory_bytes, spent)
        self._put(self._step_s, end_s, "step", self._step, -1, -1, "", -1)

    def use_events(
        self, make_event: Callable[[], Event], captures: Callable[[], bool] = lambda: False
    ) -> None:
        """From now on work and steps have the times of the device, by events that this makes.

        ``captures``: whether work is captured just now, and does not run.
        """
        self.device = DeviceTimes(make_event, captures)

    def moment(self) -> float | Moment:
        """Now, or when the device will have done what was handed to it so far."""
        if self.device is not None:
            with suppress(RuntimeError):  # of a device that failed; messages must report it
                return self.device.moment()
        return time.perf_counter()

    def note(self, values: Mapping[str, object]) -> None:
        """Values that belong to the step that ran last."""
        if self.book is None:
            return
        if self.device is None:
            self.book.note(values)
            return
        book, now = self.book, time.perf_counter()
        self.device.own(now, now, lambda *_: book.note(values))
        self.device.look()

    def _settle(self, forget: bool) -> None:
        """Write what is left of the step before, or forget it: not what is of the next one, or of one that is kept."""
        if not forget:
            self._kept.append(self._step)
            self.flush()
            return
        spans = self._spans
        with self._lock:
            for _ in range(len(spans)):
                span = spans.popleft()
                if span[2] > self._step or span[2] in self._kept:
                    spans.append(span)

    def add(
        self,
        kind: str,
        step: int,
        microbatch: int,
        start_s: float | Moment,
        end_s: float,
        peer: int = -1,
        what: str = "",
        stage: int = -1,
    ) -> None:
        """Record a span; from any thread. Times are those of ``time.perf_counter``.

        ``kind``: as in :class:`weft.timeline.Span`; a step's also flushes. ``start_s`` may be a :meth:`moment`.
        ``peer``: the rank at the other end of a send, a receive or a wait. ``what``: what was sent, one of
        :data:`weft.profiler.format.CONTENTS`.
        """
        device = self.device
        if isinstance(start_s, Moment):
            if device is not None:
                device.look()
            start_s = min(start_s.at_s, end_s)
        if device is None or kind in MESSAGES:
            self._put(start_s, end_s, kind, step, microbatch, peer, what, stage)
        elif kind in ON_DEVICE:
            device.work(
                start_s,
                end_s,
                lambda begin, end: self._put(begin, end, kind, step, microbatch, peer, what, stage),
            )
        else:
            device.own(
                start_s, end_s, lambda begin, end: self._put_if_any(begin, end, kind, step, microbatch, peer)
            )

    def _put_if_any(
        self, start_s: float, end_s: float, kind: str, step: int, microbatch: int, peer: int
    ) -> None:
        """Records a span of the device, unless it is empty."""
        if end_s > start_s:
            self._put(start_s, end_s, kind, step, microbatch, peer, "", -1)

    def _put(
        self, start_s: float, end_s: float, kind: str, step: int, microbatch: int, peer: int, what: str, stage: int
    ) -> None:  # fmt: skip
        spans = self._spans
        spans.append(
            (start_s, end_s, step, microbatch, stage, peer, KIND_CODES[kind], CONTENT_CODES[what], MARK)
        )
        if self.book is not None:
            self.book.taken[kind] += end_s - start_s
        if kind == "step" or (
            len(spans) >= self._block and kind != "collector"
        ):  # which may be within a flush
            if self._keeps:
                self.flush()
            elif len(spans) > MOST_HELD:
                spans.popleft()

    def flush(self) -> None:
        """Hand what was recorded to the system, which keeps it whatever happens to this process."""
        with self._lock:
            self._flush()

    def close(self, ended: bool = True) -> None:
        """Write the rest and close the files; what is recorded afterwards is dropped. ``ended``: the job is over."""
        if self.device is not None:
            self.device.close()
        if self.book is not None:
            self.book.close(ended)
        self._settle(not self._keeps)
        with self._lock:
            self._flush()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _flush(self) -> None:
        buffer, spans = self._buffer, self._spans
        while spans:  # others may add more meanwhile
            used = 0
            for _ in range(min(len(spans), self._block)):
                _PACK(buffer, used, *spans.popleft())
                used += RECORD.size
            self._write(memoryview(buffer)[:used])

    def _write(self, block: memoryview) -> None:
        if self._file is None:
            return
        size = len(block)
        try:
            while block:
                block = block[os.write(self._file, block) :]
            self._written += size
        except OSError as error:
            _LOG.warning("the recording ends here: %s cannot be written: %s", self._path, error.strerror)
            with suppress(OSError):
                os.ftruncate(self._file, self._written)
            with suppress(OSError):
                os.close(self._file)
            self._file = None


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f'"record" names a folder where nothing can be written: {path}: {error.strerror}; name another one, '
        "for example weft run --record recording"
    )
