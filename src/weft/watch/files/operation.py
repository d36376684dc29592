"""The operation on a file in which a process of this host stands, and for how long, asked of Linux from outside of it.

Linux shows the system call of every thread that waits in one, and the descriptors of the process. So this sees the
calls of all libraries, also those that hold Python's lock, and costs a rank nothing. A process may look at itself and
at what it has started; at others as its system allows.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from weft.watch.heartbeat import Page, State

_BY_DESCRIPTOR = {
    "x86_64": {
        "reads": (0, 17, 19, 295, 327), "writes": (1, 18, 20, 40, 285, 296, 326, 328), "closes": (3,),
        "looks at": (5,), "locks": (72, 73), "flushes": (26, 74, 75, 277, 306), "cuts": (77,), "lists": (78, 217),
    },
    "aarch64": {
        "reads": (63, 65, 67, 69, 286), "writes": (47, 64, 66, 68, 70, 71, 285, 287), "closes": (57,),
        "looks at": (80,), "locks": (25, 32), "flushes": (82, 83, 84, 267), "cuts": (46,), "lists": (61,),
    },
}  # fmt: skip
"""Calls whose first argument is a descriptor, by their numbers on each machine."""
_BY_PATH = {
    "x86_64": {
        "opens": (2, 85), "looks at": (4, 6, 21), "makes": (83,), "removes": (84, 87), "renames": (82,), "cuts": (76,),
    },
    "aarch64": {},
}  # fmt: skip
"""Calls whose first argument is a path."""
_BY_FOLDER = {
    "x86_64": {
        "opens": (257, 437), "looks at": (262, 269, 332, 439), "makes": (258,), "removes": (263,),
        "renames": (264, 316),
    },
    "aarch64": {
        "opens": (56, 437), "looks at": (48, 79, 291, 439), "makes": (34,), "removes": (35,), "renames": (38, 276),
    },
}  # fmt: skip
"""Calls whose first argument is the descriptor of a folder, and the second one a path in it."""
_HERE = -100
"""The descriptor that stands for the process's own folder."""
_NO_STORAGE = ("/dev/", "/proc/", "/sys/", "/memfd:")
_PATH_BYTES = 4096
_MOST_PROCESSES = 64
_MAPPED = "waits for a file that is mapped into its memory"


class Operation(NamedTuple):
    """The operation that a thread is blocked in.

    Attributes:
        text: For people: ``reads /data/part-3``.
        call: Identifies the call: the next one, even of the same kind, has another text.
    """

    text: str
    call: str


def find(pid: int) -> Operation | None:
    """The operation that a process is blocked in, or a worker of its loader; the first thread goes first."""
    for process in _family(pid):
        found = _of_process(process)
        if found is not None:
            return (
                found if process == pid else Operation(f"{found.text} in its process {process}", found.call)
            )
    return None


def _family(pid: int) -> Iterator[int]:
    waiting = [pid]
    for _ in range(_MOST_PROCESSES):
        if not waiting:
            return
        yield (process := waiting.pop(0))
        for thread in _threads(process):
            waiting += map(int, _text(f"/proc/{process}/task/{thread}/children").split())


def _threads(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread != pid, thread))
    except (OSError, ValueError):
        return []


def _of_process(pid: int) -> Operation | None:
    for thread in _threads(pid):
        place = f"/proc/{pid}/task/{thread}"
        call = _text(f"{place}/syscall").split()
        text = in_words(pid, call) if call else ""
        if not text:
            continue
        state = _text(f"{place}/stat").rpartition(")")[2].split()[:1]
        if state in (["T"], ["t"]) or (
            text == _MAPPED and state != ["D"]
        ):  # a signal holds it, or it computes
            continue
        done = [line for line in _text(f"{place}/io").splitlines() if line.startswith("sysc")]
        return Operation(text, " ".join([str(thread), *call, *done]))
    return None


def in_words(pid: int, call: list[str], machine: str = platform.machine()) -> str:
    """A system call in words; empty if it is none on a file that storage has.

    Args:
        pid: The process that is in it.
        call: Its number and arguments, as Linux shows them; a page that is not in memory has the number -1.
        machine: Whose numbers these are.
    """
    if call[0] == "-1":
        return _MAPPED
    if len(call) < 3:
        return ""
    number, first, second = int(call[0]), int(call[1], 16), int(call[2], 16)
    path = ""
    if verb := _verb(_BY_DESCRIPTOR, machine, number):
        path = _link(pid, first)
    elif verb := _verb(_BY_PATH, machine, number):
        path = _path(pid, _HERE, first)
    elif verb := _verb(_BY_FOLDER, machine, number):
        path = _path(pid, (first & 0xFFFFFFFF) - ((first & 0x80000000) << 1), second)
    return f"{verb} {path}" if path.startswith("/") and not path.startswith(_NO_STORAGE) else ""


def _verb(calls: Mapping[str, Mapping[str, tuple[int, ...]]], machine: str, number: int) -> str:
    return next((verb for verb, numbers in calls.get(machine, {}).items() if number in numbers), "")


def _link(pid: int, descriptor: int) -> str:
    """The file behind a descriptor: that asks no storage."""
    try:
        return os.readlink(f"/proc/{pid}/{'cwd' if descriptor == _HERE else f'fd/{descriptor}'}")
    except OSError:
        return ""


def _path(pid: int, folder: int, address: int) -> str:
    """The path that stands in the memory of a process."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            page_end = 4096 - address % 4096  # the next one may not be there
            memory.seek(address)
            text = memory.read(page_end)
            if b"\0" not in text:
                text += memory.read(_PATH_BYTES)
    except (OSError, ValueError, OverflowError):
        return ""
    name = os.fsdecode(text.partition(b"\0")[0])
    return os.path.join(_link(pid, folder), name) if name else _link(pid, folder)


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


EVERY_S = 1.0
IDLE_S = 2.0
"""A rank that turned to something new, or showed a sign, so lately is not looked at."""


class Look:
    """A process, seen as `find` sees it.

    Args:
        pid: Which one.
        find: Gives what it stands in.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        pid: int,
        find: Callable[[int], Operation | None] = find,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid, self._find, self._clock = pid, find, clock
        self._call, self._since, self._looked = "", 0.0, float("-inf")
        self._mark: object = None
        self._moved = clock()
        self.found = ("", 0.0)
        """The operation that it is blocked in, and for how many seconds that has been seen; empty if in none."""

    @property
    def quiet_s(self) -> float:
        """For how long it has not got on."""
        return self._clock() - self._moved

    def observe(self, mark: object) -> tuple[str, float]:
        """`found`, looked for once a second. ``mark``: as long as this changes the process gets on."""
        now = self._clock()
        if mark != self._mark:
            self._mark, self._moved = mark, now
        if now - self._looked < EVERY_S:
            return self.found
        self._looked = now
        operation = self._find(self._pid) if now - self._moved >= IDLE_S else None
        call = "" if operation is None else operation.call
        if call != self._call:
            self._call, self._since = call, now
        self.found = ("", 0.0) if operation is None else (operation.text, now - self._since)
        return self.found


class Outside:
    """Ranks of this host as whoever has started them sees them: those that cannot show themselves what they stand in.

    A rank has not joined its job yet, or it waits in a call that holds Python's lock: then it does not beat.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._looks: dict[int, Look] = {}

    def look(self, rank: int, pid: int) -> None:
        """Shows, in the rank's slot, what its process stands in, if it does not do so itself."""
        sign = self._page.sign(rank)
        watched = sign.state in (State.RUNNING, State.FINISHING)
        if rank not in self._looks:
            self._looks[rank] = Look(pid)
        before = self._looks[rank].found
        found = self._looks[rank].observe(sign.beat if watched else None)
        if found != before:
            self._page.slot(rank).stand(*found)
