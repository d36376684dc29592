"""A rank starts the process beside it, and dismisses it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from weft.watch.beside.program import stat
from weft.watch.process import began

PROGRAM = Path(__file__).with_name("program.py")
LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prte", "prted"}
"""What Open MPI 4 and 5 call what they start ranks with, on the host of `mpirun` and on the others."""
_OF_RANKS = ("OMPI_", "PMIX_", "PRTE_")
_GENERATIONS = 8
_LAST_SECONDS = 2.0
_LONGEST_S = 1e9


class Beside:
    """The process beside this one, if the system can have one; see the package."""

    def __init__(self, of_mpirun: bool) -> None:
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or not sys.executable:
            return
        launcher = launcher_of(os.getpid()) if of_mpirun else 0
        numbers = [os.getpid(), began(os.getpid()) or 0, launcher, began(launcher) or 0 if launcher else 0]
        nothing = subprocess.DEVNULL
        with suppress(OSError):  # without it a job is what it is elsewhere
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), *map(str, numbers)],
                env={name: text for name, text in os.environ.items() if not name.startswith(_OF_RANKS)},
                stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True,
                bufsize=0,
            )  # fmt: skip

    def tell(self, port: int, heartbeat_s: float) -> None:
        """Where the job's store is, and after how many seconds a rank counts as frozen."""
        self._say(b"%d %d\n" % (port, math.ceil(min(heartbeat_s, _LONGEST_S))))

    def dismiss(self) -> None:
        """All ranks have come to their end."""
        self._say(b".")
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_SECONDS)

    def _say(self, words: bytes) -> None:
        if self._process is not None and self._process.stdin is not None and os.getpid() == self._owner:
            with suppress(OSError, ValueError):
                self._process.stdin.write(words)


def launcher_of(pid: int) -> int:
    """The process of Open MPI that has started a rank, or what started the rank, for this user; 0: there is none.

    A script in between is passed over.
    """
    with suppress(OSError, IndexError, ValueError):
        for _ in range(_GENERATIONS):
            pid = int(stat(pid)[1])
            if pid < 1:
                break
            name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
            if name.partition(".")[0] in LAUNCHERS:
                return pid if os.stat(f"/proc/{pid}").st_uid == os.geteuid() else 0
    return 0
