"""The writing side of a job's folder: one launcher at a time, which holds the lock of the events.

A folder may have come from elsewhere, so no link in it is followed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import LaunchError
from weft.profiler.clock import clock_offset_s
from weft.untrusted import reason, shown_path, whole
from weft.watch.files.blocked_ranks import BlockedRanks
from weft.watch.process import began, boot, host_name
from weft.watch.progress_file import Pace, write

RUN, EVENTS, FAILURE = "run.json", "events.jsonl", "failure.json"
_ATTEMPT = re.compile(r"attempt-([0-9]{1,9})")


def attempt_folder(folder: Path, number: int) -> Path:
    """Where the logs of one start are."""
    return folder / f"attempt-{number}"


def log_file(folder: Path, attempt: int, rank: int) -> Path:
    """The file with a rank's output after one start."""
    return attempt_folder(folder, attempt) / f"rank-{rank}.log"


def log_files(folder: Path, attempt: int, rank: int) -> list[Path]:
    """The files with what a rank wrote: one of weft's or Slurm's; of other engines its output, and then its errors.

    attempt-0/rank-3.log                            weft, Slurm
    attempt-0/rank.3/stdout, stderr                 Open MPI, which writes rank.03 if there are more than ten
    attempt-0/none_x1y2/attempt_1/3/stdout.log      torchrun; the newest of its own attempts counts
    """
    place = attempt_folder(folder, attempt)
    by_mpirun = [path for form in ("rank.*", "*/rank.*") for path in place.glob(form)]
    for path in by_mpirun:
        if whole(path.suffix[1:]) == rank:
            return [path / "stdout", path / "stderr"]
    by_torchrun = [path for path in place.glob(f"*/attempt_*/{rank}") if _torchrun_attempt(path) >= 0]
    if by_torchrun:
        newest = max(by_torchrun, key=_torchrun_attempt)
        return [newest / "stdout.log", newest / "stderr.log"]
    return [log_file(folder, attempt, rank)]


def _torchrun_attempt(path: Path) -> int:
    number = whole(path.parent.name.removeprefix("attempt_"))
    return -1 if number is None else number


def attempts(folder: Path) -> list[int]:
    """The numbers of the starts whose logs are there, the oldest first."""
    found = (_ATTEMPT.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def opened(path: Path, flags: int = os.O_RDONLY) -> int:
    """A regular file, which no link leads to; nothing is waited for.

    Raises:
        OSError: It is something else, or is not there.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file", str(path))
    return descriptor


def reader(path: Path) -> BinaryIO:
    """The same, to read bytes from."""
    return os.fdopen(opened(path), "rb")


class Journal:
    """The journal of a job, written into its folder as it runs.

    ``attempt``: how often the job was started before.
    What cannot be written later (a full disk) is reported once, as ``lost``, and the job goes on.

    Args:
        folder: Where; it is made if it is not there.
        run: What is to run; see `weft.launch.engines.plan.Plan.as_record`. None: another process has said
            that, and this one goes on with what that one began.

    Raises:
        LaunchError: The folder cannot be written to, or another job runs with it.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.lost = ""
        self._logs: dict[int, int] = {}
        self.attempt = 0
        self._pace, self._step = Pace(), 0
        self._offset_s = clock_offset_s()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = opened(folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            known = attempts(folder)
            self._next = known[-1] + 1 if known else 0
            if run is None:
                return
            self._lock()
            with suppress(FileNotFoundError):
                (folder / FAILURE).unlink()
            launcher = {"pid": os.getpid(), "began": began(os.getpid()), "boot": boot(), "host": host_name()}
            before = os.fstat(self._events).st_size
            self._write(RUN, {**run, "time": self._now(), "launcher": launcher, "events_from": before})
        except OSError as error:
            raise LaunchError(
                f'--log-dir "{shown_path(folder)}" cannot be written to ({reason(error)}): name another folder'
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._events, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._events)
            raise LaunchError(
                f'a job runs with the folder "{shown_path(self.folder)}": name another one for this job, or end that '
                f"one with weft stop {shown_path(self.folder)}"
            ) from None
        except OSError:  # this file system has no locks
            return

    def begin(self, attempt: int, ranks: int, by_engine: bool = False) -> Path:
        """The folder of a start, ``attempt`` restarts after the first one: its ranks get logs of their own.

        ``by_engine``: somebody else writes these.
        """
        self._close_logs()
        self.attempt, number = attempt, self._next
        try:
            attempt_folder(self.folder, number).mkdir()
            self._next += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            for rank in () if by_engine else range(ranks):
                self._logs[rank] = opened(log_file(self.folder, number, rank), flags)
        except OSError as error:
            self._lose(error)
        self.note("attempt", logs=f"attempt-{number}", ranks=ranks)
        return attempt_folder(self.folder, number)

    def reach(self, step: int) -> None:
        """The job is in this step; 0 before the first."""
        self._step = step
        self._write_progress()

    def _write_progress(self, last: bool = False) -> None:
        progress = self._pace.reach(self._step, self._now(), last) if self._step else None
        if progress is not None:
            write(attempt_folder(self.folder, self._next - 1), progress)

    def stand(self, blocked: BlockedRanks) -> None:
        """The files in which ranks stand, where that has changed."""
        blocked.write(attempt_folder(self.folder, self._next - 1))

    def take(self, rank: int, data: bytes) -> None:
        """Appends a rank's output to its log."""
        if data and rank in self._logs:
            self._append(self._logs[rank], data)

    def note(self, event: str, **values: Any) -> None:
        """One line of what happens."""
        line = {"time": self._now(), "event": event, "attempt": self.attempt, **values}
        self._append(self._events, f"{json.dumps(line)}\n".encode())

    def fail(self, failure: Mapping[str, Any]) -> None:
        """Notes how the present attempt failed."""
        with_time = {"time": self._now(), "attempt": self.attempt, **failure}
        try:
            self._write(FAILURE, with_time)
        except OSError as error:
            self._lose(error)
        self.note("failed", rank=failure.get("rank"), headline=failure.get("headline"))

    def close(self) -> None:
        """Nothing more comes; another job may use the folder."""
        self._close_logs()
        os.close(self._events)

    def _now(self) -> float:
        return round(time.perf_counter() + self._offset_s, 3)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        """Whole or not at all."""
        new = self.folder / f".{name}-{secrets.token_hex(4)}"
        descriptor = opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
            new.replace(self.folder / name)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def _append(self, descriptor: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or reason(error)

    def _close_logs(self) -> None:
        """Nothing more comes of this attempt."""
        self._write_progress(last=True)
        self._pace, self._step = Pace(), 0
        for descriptor in self._logs.values():
            os.close(descriptor)
        self._logs.clear()


class Nowhere:
    """The journal of a job that leaves none."""

    lost = ""

    def begin(self, attempt: int, ranks: int, by_engine: bool = False) -> Path:
        """Nothing."""
        return Path()

    def reach(self, step: int) -> None:
        """Nothing."""

    def stand(self, blocked: BlockedRanks) -> None:
        """Nothing."""

    def take(self, rank: int, data: bytes) -> None:
        """Nothing."""

    def note(self, event: str, **values: Any) -> None:
        """Nothing."""

    def fail(self, failure: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
