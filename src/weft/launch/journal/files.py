"""The names in a job's folder, and how files there are opened.

A folder may have come from elsewhere, so no link in it is followed.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

from weft.untrusted import whole

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
