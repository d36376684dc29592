"""The other ranks that a launcher has started on this host, before they have come to `weft.init`.

Nobody watches them yet: under mpirun, srun and torchrun the ranks watch each other from `weft.init` on. One that is
stopped by a signal before would be waited for as long as a start may take. So the ranks that wait look at its process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from weft.errors import LaunchError
from weft.launch.discovery import Place, discover
from weft.untrusted import whole
from weft.watch import statement
from weft.watch.judge import Verdict
from weft.watch.process import exit_now, host_name, is_stopped

EVERY_S = 1.0


class FrozenSibling(BaseException):
    """Another rank stands still. No script catches it: what waits only cleans up.

    Args:
        rank: That one.
        pid: Its process.
        seconds: For how long it has been stopped.
    """

    def __init__(self, rank: int, pid: int, seconds: float) -> None:
        who = f"rank {rank} on {host_name()} (pid {pid})"
        super().__init__(f"{who} is frozen: it was stopped by a signal {seconds:.0f} s ago, before weft.init")
        self.rank, self.pid = rank, pid

    def end(self, by: int) -> NoReturn:
        """Ends this rank, ``by``, and the one that stands still: so the launcher ends the job."""
        statement.about(by, Verdict("frozen", (self.rank,), str(self)))
        with suppress(OSError):
            os.write(2, f"weft: {self}\nrank {by} ends because of that\n".encode(errors="replace"))
            # It would outlive the polite signal with which launchers end a job.
            os.kill(self.pid, signal.SIGKILL)
        exit_now(1)


class Siblings:
    """Looks whether another rank stands still for too long.

    Args:
        place: This rank's.
        frozen_s: How long a rank may be stopped; None: nobody looks.
    """

    def __init__(self, place: Place, frozen_s: float | None) -> None:
        self._place = place
        self._frozen_s = frozen_s if place.source != "single" and place.shared_fd is None else None
        self._looked_s = time.monotonic()
        self._stopped_s: dict[int, float] = {}

    def look(self) -> None:
        """Looks, at most once a second.

        Raises:
            FrozenSibling: One is stopped, and has been for `frozen_s`.
        """
        now = time.monotonic()
        if self._frozen_s is None or now - self._looked_s < EVERY_S:
            return
        self._looked_s = now
        stopped = {pid for pid in _children(os.getppid()) if pid != os.getpid() and is_stopped(pid)}
        self._stopped_s = {pid: self._stopped_s.get(pid, now) for pid in stopped}
        for pid, since_s in self._stopped_s.items():
            rank = self._rank(pid) if now - since_s >= self._frozen_s else None
            if rank is not None:
                raise FrozenSibling(rank, pid, now - since_s)

    def _rank(self, pid: int) -> int | None:
        """Its rank, if it is one of this job."""
        with suppress(OSError, LaunchError, UnicodeDecodeError):
            text = Path(f"/proc/{pid}/environ").read_text()
            environ = dict(each.split("=", 1) for each in text.split("\0") if "=" in each)
            other, own = discover(environ), self._place
            same = (other.source, other.job, other.world_size) == (own.source, own.job, own.world_size)
            return other.rank if same and other.rank != own.rank else None
        return None


def _children(parent: int) -> Iterator[int]:
    """The processes that `parent` has started and that still run."""
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        pid = whole(name)
        with suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            after_its_name = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2]
            if pid and int(after_its_name.split()[1]) == parent:
                yield pid
