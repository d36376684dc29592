"""The speed at which a file system gives a data set to the readers of a loader.

    whole files      each reader takes the next file of a shuffled list and reads all of it: images, shards
    records          each reader reads pieces of a size from random places: an array or a table in one file
    in a row         one reader, one file after the other: what a copy of the data would take

Readers are threads: reading a file frees Python's lock, as a loader's processes are free of each other's. What is read
is thrown away, so decoding is not in these figures.

fio (Jens Axboe's, GPL) measures the same where it is installed: a second opinion. It reads only.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.errors import FormatError, UsageError
from weft.measure.files import Held, forget, open_file, share_in_memory
from weft.untrusted import parse_json, shown_path

CHUNK = 1 << 20
"""So much a system call reads of a whole file."""
COLD, WARM = "cold", "warm"
IS_COLD, IS_WARM = 0.05, 0.95
"""Up to which share in memory files count as cold, and from which as warm."""


class Rate(NamedTuple):
    """The result of one measurement.

    Attributes:
        pattern: "whole files", "records" or "in a row".
        readers: How many read at once.
        cached: The share of the files that was in the system's memory before; None if unknown.
        bytes_per_s: All readers together.
        reads_per_s: Files or records, all readers together.
        slowest_s: 99 % of the reads took at most this.
        read_bytes: How much was read.
        seconds: How long that took.
    """

    pattern: str
    readers: int
    cached: float | None
    bytes_per_s: float
    reads_per_s: float
    slowest_s: float
    read_bytes: int
    seconds: float

    @property
    def state(self) -> str:
        """`cold`, `warm`, or what lies between."""
        if self.cached is None:
            return "unknown"
        if self.cached <= IS_COLD:
            return COLD
        return WARM if self.cached >= IS_WARM else f"{self.cached:.0%} warm"


Read = Callable[[], int]
"""Reads one file or one record, and says how many bytes that were."""


def measure(
    files: Sequence[Held],
    pattern: str,
    readers: int,
    seconds: float,
    record: int = 0,
    drop: bool = False,
    seed: int = 0,
) -> Rate:
    """Read for a while, and say how fast it went.

    Args:
        files: The data set.
        pattern: As in the module's head.
        readers: How many threads read at once.
        seconds: How long; it ends before that when every file was read once, or a quarter of the data in records.
        record: Bytes of a record, for the pattern "records".
        drop: Have the system forget the files first.
        seed: Of the order.
    """
    chosen = list(files)
    if pattern != "in a row":
        random.Random(seed).shuffle(chosen)
    if drop:
        forget(chosen)
    cached = share_in_memory(chosen, seed=seed)
    reads = _records(chosen, record, seed) if pattern == "records" else _whole(chosen)
    taken, faults = _Turns(reads, time.perf_counter() + seconds), _Faults()
    lists: list[list[tuple[float, int]]] = [[] for _ in range(readers)]
    threads = [
        threading.Thread(target=_read, args=(taken, found, faults), name="weft-storage", daemon=True)
        for found in lists
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    if faults.first is not None:
        raise UsageError(f"{shown_path(faults.first.filename or 'a file')}: {faults.first.strerror}")
    found = sorted(each for part in lists for each in part)
    total = sum(size for _, size in found)
    slowest = found[min(len(found) - 1, int(0.99 * len(found)))][0] if found else 0.0
    return Rate(pattern, readers, cached, total / took, len(found) / took, slowest, total, took)


class _Faults:
    first: OSError | None = None


class _Turns:
    """Hands the reads to whichever reader comes, until the time is over."""

    def __init__(self, reads: Iterator[Read], until_s: float) -> None:
        self._reads, self._until_s, self._lock = reads, until_s, threading.Lock()

    def next(self) -> Read | None:
        with self._lock:
            return next(self._reads, None) if time.perf_counter() < self._until_s else None


def _read(turns: _Turns, found: list[tuple[float, int]], faults: _Faults) -> None:
    try:
        while (read := turns.next()) is not None:
            began = time.perf_counter()
            size = read()
            found.append((time.perf_counter() - began, size))
    except OSError as error:
        faults.first = faults.first or error


def _whole(files: Sequence[Held]) -> Iterator[Read]:
    """Every file once; large ones in pieces, so that the time is kept."""
    for held in files:
        for start in range(0, held.size, 64 * CHUNK):
            yield lambda held=held, start=start: _pieces(held.path, start, 64 * CHUNK)  # type: ignore[misc]


def _pieces(path: str, start: int, most: int) -> int:
    descriptor = open_file(path)
    try:
        buffer, total = bytearray(CHUNK), 0
        while total < most and (got := os.preadv(descriptor, [buffer], start + total)):
            total += got
        return total
    finally:
        os.close(descriptor)


def _records(files: Sequence[Held], size: int, seed: int) -> Iterator[Read]:
    """Records from random places; a file's share is that of its size.

    They are a quarter of the data: with more of them, most would lie in memory by what was read before.
    """
    chosen = random.Random(seed)
    weights = list(accumulate(held.size for held in files))
    for _ in range(max(1, weights[-1] // size // 4)):
        held = chosen.choices(files, cum_weights=weights)[0]
        start = chosen.randrange(max(1, held.size - size + 1))
        yield lambda held=held, start=start: _record(held.path, start, size)  # type: ignore[misc]


def _record(path: str, start: int, size: int) -> int:
    descriptor = open_file(path)
    try:
        return len(os.pread(descriptor, size, start))
    finally:
        os.close(descriptor)


def ladder(most: int) -> list[int]:
    """Numbers of readers to try: doubling up to the most.

    >>> ladder(6)
    [1, 2, 4, 6]
    """
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found if most <= 1 else [*found, most]


def measure_all(
    files: Sequence[Held], readers: Sequence[int], seconds: float, record: int, drop: bool
) -> Iterator[Rate]:
    """In a row and by the loader's pattern, with each number of readers; then once more as it lies in memory.

    With `drop` the system forgets the files before each but the last.
    """
    pattern = "records" if record else "whole files"
    yield measure(files, "in a row", 1, seconds, drop=drop)
    rates = []
    for seed, count in enumerate(readers, start=1):
        rates.append(measure(files, pattern, count, seconds, record, drop, seed))
        yield rates[-1]
    best = max(rates, key=lambda rate: rate.bytes_per_s).readers
    # what was read last is in memory, if it has room: the same files in the same order
    measure(files, pattern, best, seconds, record, False, seed=len(readers) + 1)
    yield measure(files, pattern, best, seconds, record, False, seed=len(readers) + 1)


FIO_FILES = 50
"""So many of the largest files fio is given."""


class FioRate(NamedTuple):
    """A rate measured by fio: its pattern, how many readers, bytes a second in all."""

    pattern: str
    readers: int
    bytes_per_s: float


def has_fio() -> bool:
    """True if fio is installed."""
    return shutil.which("fio") is not None


def fio_arguments(files: Sequence[Held], pattern: str, readers: int, seconds: float, block: int) -> list[str]:
    """The command: reads of `block` bytes, in a row or at random, after the system has forgotten the files."""
    largest = sorted(files, key=lambda held: -held.size)[:FIO_FILES]
    names = ":".join(held.path.replace("\\", "\\\\").replace(":", "\\:") for held in largest)
    return [
        "fio", "--name=weft", f"--filename={names}", "--readonly", "--allow_file_create=0", "--invalidate=1",
        f"--rw={'read' if pattern == 'in a row' else 'randread'}", f"--bs={block}", f"--numjobs={readers}", "--thread",
        "--group_reporting", "--time_based", f"--runtime={max(1, round(seconds))}", "--ioengine=psync",
        "--output-format=json",
    ]  # fmt: skip


def measure_by_fio(
    files: Sequence[Held], pattern: str, readers: int, seconds: float, block: int
) -> FioRate | None:
    """The rate that fio measures; None if it fails, for example on a file system that it does not know."""
    command = fio_arguments(files, pattern, readers, seconds, block)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 5 + 60, check=False)
        found = parse_json(done.stdout[done.stdout.index("{") :], "fio's answer is no JSON")
        return FioRate(pattern, readers, float(found["jobs"][0]["read"]["bw_bytes"]))
    except (OSError, ValueError, LookupError, TypeError, FormatError, subprocess.TimeoutExpired):
        return None
