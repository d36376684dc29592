"""A job that was started from Python: wait for it, read what it says, end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.errors import JobError, LaunchError, WeftError
from weft.launch.engines.described import Described
from weft.launch.journal.job_status import END_S, SAVE_S, JobStatus, read
from weft.launch.journal.journal import log_files, reader
from weft.untrusted import shown_path, translated

WITH_LOGS = ("local", "ssh", "torchrun", "mpirun", "slurm")
"""Engines whose jobs write a folder, with logs of ranks; MPICH's mpirun keeps none."""
_GO_ON = os.EX_TEMPFAIL
_LIVING = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "STOPPED",
    "RESIZING",
)


class Handle(ABC):
    """A started job, which can be waited for, stopped and read."""

    _tick_s = 0.1
    """Between two looks."""

    def __init__(self, job: Described) -> None:
        self.job = job
        self._stopped = False

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code; None while the job runs."""

    @abstractmethod
    def _end(self, save_s: float) -> None: ...

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit code of a job that ended well, was asked to end, or has saved and ended (75).

        Raises:
            JobError: The job failed; the error names the rank to blame where that is known.
            TimeoutError: It still runs after so many seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self._look()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the job {self.job.name} still runs after {timeout_s:g} s")
        if code in (0, _GO_ON) or self._stopped:
            return code
        raise self._error(code)

    def stop(self, save_s: float = SAVE_S) -> int:
        """Asks the job to save and end, ends it if that takes longer, and gives its exit code.

        ``save_s``: how many seconds it may take to save; 0 ends it at once.
        """
        self._stopped = True
        if self.poll() is None:
            self._end(save_s)
        return self.wait(2 * END_S)

    def logs(self, rank: int = 0) -> str:
        """The output of a rank since the job was started last; empty before.

        Raises:
            LaunchError: The job has no ``log_dir``, its engine keeps logs in its own way, or there is no such rank.
        """
        folder = self._folder()
        if folder is None:
            raise LaunchError(
                f"the job {self.job.name} has no logs by rank: give it a log_dir and one of the engines "
                f"{', '.join(WITH_LOGS)}"
            )
        self._check_rank(rank)
        status = self._status()
        number = status.logs if status is not None else None
        if number is None:
            return ""
        return "".join(text_of(path) for path in log_files(folder, number, rank) if os.path.lexists(path))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.job.ranks:
            raise LaunchError(f"there is no rank {rank}: the job has {self.job.ranks}")

    def _look(self) -> int | None:
        code = self.poll()
        if code is None:
            time.sleep(self._tick_s)
        return code

    def _folder(self) -> Path | None:
        if not self.job.log_dir or self.job.engine not in WITH_LOGS or self.job.form == "mpich":
            return None
        return Path(self.job.folder, self.job.log_dir)

    def _status(self) -> JobStatus | None:
        """The status of this start in the job's folder; None without one."""
        folder = self._folder()
        with suppress(WeftError):
            status = read(folder) if folder is not None else None
            return status if status is not None and self._is_own(status) else None
        return None

    def _is_own(self, status: JobStatus) -> bool:
        """True if a status is that of this start."""
        return False

    def _error(self, code: int) -> JobError:
        status = self._status()
        failure = status.failure if status is not None else None
        if failure is not None and isinstance(failure.get("headline"), str):
            rank = failure.get("rank")
            parts = [failure["headline"], failure.get("details")]
            text = "\n".join(part for part in parts if isinstance(part, str) and part)
            return JobError(text, code, rank if isinstance(rank, int) else None)
        hint = "" if self.job.log_dir else "; with log_dir=... this error says why"
        return JobError(f"the job {self.job.name} ended with exit code {code}{hint}", code)


def text_of(path: Path) -> str:
    """The text of a log."""
    with translated(f'"{shown_path(path)}" cannot be read', LaunchError), reader(path) as file:
        return file.read().decode(errors="replace")


class ProcessHandle(Handle):
    """A job whose launcher is a process of this machine.

    Attributes:
        process: The launcher.
    """

    def __init__(self, job: Described, process: subprocess.Popen[bytes]) -> None:
        super().__init__(job)
        self.process = process

    def poll(self) -> int | None:
        """The exit code; None while the job runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def _end(self, save_s: float) -> None:
        for number, seconds in ((signal.SIGTERM, max(save_s, 0.2)), (signal.SIGTERM, END_S)):
            self.process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return
        self.process.kill()

    def _is_own(self, status: JobStatus) -> bool:
        launcher = status.run.get("launcher")
        return isinstance(launcher, Mapping) and launcher.get("pid") == self.process.pid


class SlurmHandle(Handle):
    """A job that Slurm has. What is asked of it is asked of ``scontrol``, and ``scancel`` ends it.

    Attributes:
        number: The job's number, as Slurm writes it.
    """

    _tick_s = 1.0

    def __init__(self, job: Described, line: Sequence[str], environ: Mapping[str, str]) -> None:
        super().__init__(job)
        self._environ = environ
        done = self._asked(line)
        found = re.search(r"^([0-9]+)(?:;.*)?$", done.stdout, re.MULTILINE)
        if done.returncode or not found:
            raise LaunchError(
                f"Slurm did not take the job {job.name}: {done.stderr.strip() or done.returncode}"
            )
        self.number = found[1]
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while the job waits or runs, or Slurm does not answer.

        Raises:
            JobError: Slurm does not know the job any more.
        """
        if self._code is None:
            done = self._asked(["scontrol", "show", "job", "-o", self.number])
            if "Invalid job id" in done.stderr:
                status = self._status()
                if status is not None and status.code is not None:
                    self._code = status.code
                    return self._code
                raise JobError(
                    f"Slurm has forgotten the job {self.number}: sacct -j {self.number} may know it", 1
                )
            state = re.search(r"\bJobState=(\w+)", done.stdout)
            code = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout)
            if state and code and state[1] not in _LIVING:
                number = int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
                self._code = number or (0 if state[1] == "COMPLETED" else 1)
        return self._code

    def _is_own(self, status: JobStatus) -> bool:
        return status.handed_in == self.number

    def _asked(self, line: Sequence[str]) -> subprocess.CompletedProcess[str]:
        with translated(f"{line[0]} cannot be started", LaunchError):
            return subprocess.run(
                line, cwd=self.job.folder, env=self._environ, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", check=False,
            )  # fmt: skip

    def _end(self, save_s: float) -> None:
        self._asked(["scancel", self.number])
