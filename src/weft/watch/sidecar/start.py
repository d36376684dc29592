"""A rank starts the process beside it, and dismisses it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from weft.watch.process import began
from weft.watch.sidecar.program import ALL_CAME, LEAVING, stat

PROGRAM = Path(__file__).with_name("program.py")
LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"}
"""What Open MPI 4 and 5 call what they start ranks with, on the host of `mpirun` and on the others."""
_OF_RANKS = ("OMPI_", "PMIX_", "PRTE_")
_GENERATIONS = 8
_LAST_SECONDS = 2.0
_LONGEST_S = 1e9


class Beside:
    """The process beside this one, if the system can have one; see the package.

    Args:
        of_mpirun: Open MPI has started this rank.
        port: Where the job's store is; 0 if it is not weft's.
        heartbeat_s: After how many seconds a rank counts as frozen.
    """

    def __init__(self, of_mpirun: bool, port: int, heartbeat_s: float) -> None:
        self._owner = os.getpid()
        self._leaving = False
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or not sys.executable:
            return
        launcher = launcher_of(os.getpid()) if of_mpirun else 0
        numbers = [
            os.getpid(), began(os.getpid()) or 0, port, math.ceil(min(heartbeat_s, _LONGEST_S)),
            launcher, began(launcher) or 0,
        ]  # fmt: skip
        nothing = subprocess.DEVNULL
        with suppress(OSError):  # without it a job is what it is elsewhere
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), *map(str, numbers)],
                env={name: text for name, text in os.environ.items() if not name.startswith(_OF_RANKS)},
                stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True,
                bufsize=0,
            )  # fmt: skip

    def note_leaving(self) -> None:
        """A rank has left as it should: from now on this one may be alone."""
        if not self._leaving:
            self._leaving = True
            self._say(LEAVING)

    def dismiss(self) -> None:
        """All ranks have come to their end."""
        process = self._process
        if process is None or process.stdin is None or os.getpid() != self._owner:
            return
        self._say(ALL_CAME)
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_SECONDS)
        self._process = None

    def _say(self, word: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None and os.getpid() == self._owner:
            with suppress(OSError, ValueError):  # it has gone, or was dismissed meanwhile
                process.stdin.write(word)


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
