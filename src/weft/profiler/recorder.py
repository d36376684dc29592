"""Writes what a rank does into a file, as it happens.

A span costs a fraction of a microsecond. It joins a queue, which needs no lock; when that holds a block of
spans, and at the end of each step, they are packed into a buffer that was made beforehand and go to the
file. So a process that dies loses at most its last step, whatever kills it. An error of the file (a full
disk) ends the recording, never the training.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from weft.errors import UsageError
from weft.profiler.format import CONTENT_CODES, HEADER_BYTES, KIND_CODES, MARK, RECORD, Header

BLOCK_RECORDS = 2048
SUFFIX = ".spans"
_PACK = RECORD.pack_into
_LOG = logging.getLogger("weft")


def path_of(folder: Path, rank: int) -> Path:
    """The file of a rank in the folder of a recording."""
    return folder / f"rank{rank}{SUFFIX}"


class Recorder:
    """One rank's file.

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
        try:
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
            )
            os.write(self._file, header.pack())
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._written = HEADER_BYTES

    @classmethod
    def open(cls, folder: Path, rank: int, ranks: int) -> Recorder:
        """Begin the file of ``rank`` in ``folder``, which is made if need be; a recording that is there is replaced.

        Raises :class:`UsageError` where nothing can be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        if rank == 0:
            for old in folder.glob(f"rank*{SUFFIX}"):
                number = old.name[len("rank") : -len(SUFFIX)]
                if number.isdecimal() and int(number) >= ranks:
                    old.unlink(missing_ok=True)
        return cls(path_of(folder, rank), Header(rank, ranks, clock_offset_s(), clock_identity()))

    def add(
        self,
        kind: str,
        step: int,
        microbatch: int,
        start_s: float,
        end_s: float,
        peer: int = -1,
        what: str = "",
        stage: int = -1,
    ) -> None:
        """Record a span; from any thread. Times are those of ``time.perf_counter``.

        ``kind``: as in :class:`weft.timeline.Span`; a step's also flushes. ``peer``: the rank at the other end of a
        send, a receive or a wait. ``what``: what was sent, one of :data:`weft.profiler.format.CONTENTS`.
        """
        spans = self._spans
        spans.append(
            (start_s, end_s, step, microbatch, stage, peer, KIND_CODES[kind], CONTENT_CODES[what], MARK)
        )
        if kind == "step" or len(spans) >= self._block:
            self.flush()

    def flush(self) -> None:
        """Hand what was recorded to the system, which keeps it whatever happens to this process."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the rest and close the file; what is recorded afterwards is dropped."""
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


def clock_offset_s() -> float:
    """What to add to ``perf_counter`` for the wall clock: of several readings the one that took the least time."""
    readings = []
    for _ in range(16):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def clock_identity() -> bytes:
    """16 bytes that processes share whose ``perf_counter`` is the same clock: those of one host since its start.

    A container may have a clock of its own: it is in another time namespace then.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = b""
        with suppress(OSError):  # kernels before 5.6 have none
            space = os.readlink("/proc/self/ns/time").encode()
        return hashlib.sha256(boot + space).digest()[:16]
    return hashlib.sha256(socket.gethostname().encode(errors="replace")).digest()[:16]
