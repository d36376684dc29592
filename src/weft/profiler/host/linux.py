"""Measures of a host from files of Linux that are kept open: opening one, and psutil's way through it, take far
longer."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from weft.untrusted import whole

_LIMIT_BYTES = 1 << 20


class Core(NamedTuple):
    """The seconds of a core since the start of its host."""

    busy: float
    total: float
    io_wait: float


class Threads(NamedTuple):
    """The number of threads of the host that run or want to, and the number of the last one that began; 0: it does
    not say."""

    running: int = 0
    last: int = 0


class Kept:
    """A file that says something else whenever it is read."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """The file's present content; empty where there is no such file."""
        if self._file is not None:
            with suppress(OSError):
                return os.pread(self._file, _LIMIT_BYTES, 0)
        return b""


class Load(Kept):
    """The load of the host, of `/proc/loadavg`."""

    def __init__(self, path: str = "/proc/loadavg") -> None:
        super().__init__(path)

    def look(self) -> Threads:
        """The present load."""
        words = self.read().decode("ascii", "replace").split()
        if len(words) < 5:
            return Threads()
        return Threads(whole(words[3].partition("/")[0]) or 0, whole(words[4]) or 0)


class Stat(Kept):
    """The cores of the host, of `/proc/stat`."""

    def __init__(self, path: str = "/proc/stat") -> None:
        super().__init__(path)
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def look(self) -> list[Core]:
        """The seconds of each core until now; none where the file does not say."""
        found = []
        for line in self.read().split(b"\n")[1:]:  # the first one is of all together
            if not line.startswith(b"cpu"):
                break
            with suppress(
                ValueError
            ):  # user, nice, system, idle, iowait, irq, softirq, steal; guests are in the first
                ticks = [int(word) for word in line.split()[1:9]]
                idle, wait = (*ticks, 0, 0, 0, 0, 0)[3:5]
                total = sum(ticks)
                found.append(
                    Core((total - idle - wait) * self._tick_s, total * self._tick_s, wait * self._tick_s)
                )
        return found


def started_by(pids: Iterable[int], files: str = "/proc") -> dict[int, list[int]]:
    """For each of these processes those that it has started, and these in turn; nothing where the system does not say.

    Every process of the host is read of once, for all of `pids`.
    """
    children: dict[int, list[int]] = defaultdict(list)
    with suppress(OSError):
        for name in os.listdir(files):
            pid = whole(name)
            if pid is not None and (parent := _parent(f"{files}/{name}/stat")) is not None:
                children[parent].append(pid)
    found: dict[int, list[int]] = {}
    for pid in pids if children else ():
        found[pid] = list(children.get(pid, ()))
        for each in found[pid]:  # which grows meanwhile
            found[pid] += children.get(each, ())
    return found


def _parent(path: str) -> int | None:
    """Who started a process; nothing if it has ended."""
    with suppress(OSError, IndexError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(file, 512).rpartition(b")")[2].split(None, 2)[1])
        finally:
            os.close(file)
    return None
