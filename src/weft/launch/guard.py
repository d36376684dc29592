"""A process beside the launcher that ends what is left of a job, however the launcher went.

Ranks die with their launcher (`weft.watch.process.die_with_parent`), but what they started does not: it belongs to
nobody then. So the launcher forks a guard before the first rank, and holds the only writing end of a pipe to it. The
end of that pipe is the end of the launcher. The guard then kills the ranks' process groups, and every process whose
environment carries the job's mark: also one that has left the group, as a daemon does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from typing import NoReturn

MARK = "WEFT_JOB"
"""The variable that every process of a job inherits."""
PATIENCE_SECONDS = 2.0
"""How long processes of the job are looked for: one that starts others while it is killed may need several looks."""


class Guard:
    """See the module. `mark`: the value of `MARK` for the ranks."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        reading, self._writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _guard(reading, self.mark)
        os.close(reading)

    def watch(self, pid: int) -> None:
        """`pid` leads a process group that must not outlive the launcher."""
        os.write(self._writing, f"+{pid}\n".encode())

    def forget(self, pid: int) -> None:
        """That process has ended: its number may soon be another one's."""
        os.write(self._writing, f"-{pid}\n".encode())

    def close(self) -> None:
        """Returns when nothing of the job is left."""
        os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _guard(reading: int, mark: str) -> NoReturn:
    """The guard's own process: it holds nothing of the launcher's, and no signal for the launcher's group ends it."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.dup2(reading, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        text = b""
        while part := os.read(3, 4096):
            text += part
        for pid in _groups(text.decode()):
            _kill(-pid)
        end_marked(mark)
    finally:
        os._exit(0)


def _groups(text: str) -> set[int]:
    """The processes that were named with `+` and not with `-` after that.

    >>> _groups("+7\\n+8\\n-7\\n")
    {8}
    """
    found: set[int] = set()
    for line in text.split():
        (found.add if line[0] == "+" else found.discard)(int(line[1:]))
    return found


def end_marked(mark: str, variable: str = MARK) -> None:
    """Kills the processes of a job until there are none. ``variable``: the one that has the mark."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := find_marked(mark, variable)) and time.monotonic() < deadline:
        for pid in left:
            _kill(pid)
        time.sleep(0.01)


def find_marked(mark: str, variable: str = MARK) -> list[int]:
    """The living processes of this user that carry a job's mark; none where there is no /proc."""
    wanted = f"{variable}={mark}".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read().split(b"\0"):
                    found.append(int(name))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
