"""The statement that a rank leaves in a folder where no launcher of weft's hears it: how it failed, and how far the
job is.

said-R.json    rank R's, if it failed
step.json      rank 0's, see `weft.watch.progress_file`
files.json     rank 0's, see `weft.watch.files.blocked_ranks`
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.watch.failure import Failure
from weft.watch.files.blocked_ranks import BlockedRanks
from weft.watch.judge import Verdict
from weft.watch.process import host_name
from weft.watch.progress_file import Pace, write

FOLDER = "WEFT_ATTEMPT_FOLDER"
"""The variable that names the folder; other launchers than weft's own are started with it."""


@dataclass(frozen=True)
class Statement:
    """Whom one rank blames.

    Attributes:
        by: The rank that says so.
        rank: The one to blame, which may be itself.
        headline: What happened, in one line.
        details: The traceback, if there is one.
        kind: `failed`, `exit`, or what a verdict is called.
        victim: It only failed because another rank went away.
        time: Seconds since 1970.
        host: Where the rank runs that says so.
    """

    by: int
    rank: int
    headline: str
    details: str = ""
    kind: str = "failed"
    victim: bool = False
    time: float = 0.0
    host: str = ""


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank leaves its statement."""
    return folder / f"said-{rank}.json"


def own(failure: Failure) -> None:
    """This rank failed."""
    headline, details, victim = failure.headline(), failure.details(), failure.victim
    _leave(Statement(failure.rank, failure.rank, headline, details, victim=victim))


def ended(rank: int, code: int) -> None:
    """This rank ends itself, with an exit code that is not 0."""
    who = f"rank {rank} on {host_name()} (pid {os.getpid()})"
    _leave(Statement(rank, rank, f"{who} ended with exit code {code}", kind="exit"))


def about(by: int, verdict: Verdict) -> None:
    """This rank saw what became of another one."""
    if verdict.ranks and verdict.text:
        _leave(Statement(by, verdict.ranks[0], verdict.text, kind=verdict.kind))


def forget(rank: int) -> None:
    """Removes what this rank said before it was started again."""
    if folder := os.environ.get(FOLDER):
        with suppress(OSError):
            path_of(Path(folder), rank).unlink()


def reach(pace: Pace, step: int, last: bool = False) -> None:
    """The job is in this step; 0 before the first. ``last``: nothing comes after that."""
    folder = os.environ.get(FOLDER)
    progress = pace.reach(step, time.time(), last) if folder and step else None
    if folder and progress is not None:
        write(Path(folder), progress)


def stand(blocked: BlockedRanks) -> None:
    """The files in which ranks stand."""
    if folder := os.environ.get(FOLDER):
        blocked.write(Path(folder))


def _leave(statement: Statement) -> None:
    if folder := os.environ.get(FOLDER):
        path = path_of(Path(folder), statement.by)
        write(path.parent, {**asdict(statement), "time": time.time(), "host": host_name()}, path.name)
