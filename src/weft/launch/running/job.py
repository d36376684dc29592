"""The job that weft's own launcher runs, and the parts of a process that it uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol

from weft.launch.journal.journal import Journal, Nowhere
from weft.watch.heartbeat import Page
from weft.watch.monitor import Limits


@dataclass(frozen=True)
class Host:
    """A host, and the ``ssh`` that starts weft's agent there."""

    name: str
    command: Sequence[str]


@dataclass(frozen=True)
class Job:
    """The command and limits of a job.

    Attributes:
        command: The program and its arguments.
        ranks: How many processes.
        environ: Their environment, but for what the launcher adds.
        prefix: Whose lines start with `[rank n]`: "all", "others" (than rank 0) or "none".
        limits: When a rank that weft does not watch yet, or no more, is to blame.
        attend: Called with the page of the ranks' signs once they are started.
        attempt: How often the job was started before.
        restarts: How often it may be started again.
        journal: Records of it in a folder of its own.
        hosts: Where the ranks are, the same number on each; this machine if there are none.
        recording: Where ranks write what they record; what lies there on other hosts comes to this one at the end.
        least_hosts: With how many of them the job may go on; 0 if only with all.
        replica_ranks: How many ranks each replica has, where each is a job of its own; else 0.
        least_replicas: With how many of these the job may go on.
        replica_restarts: How often replicas may be started again, together.
        replica: Which of these this job is.
    """

    command: Sequence[str]
    ranks: int
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    prefix: str = "others"
    limits: Limits = Limits()
    attend: Callable[[Page], None] | None = None
    attempt: int = 0
    restarts: int = 0
    journal: Journal | Nowhere = field(default_factory=Nowhere)
    hosts: Sequence[Host] = ()
    least_hosts: int = 0
    recording: str = ""
    replica_ranks: int = 0
    least_replicas: int = 0
    replica_restarts: int = 0
    replica: int | None = None

    def shown(self, rank: int) -> int:
        """The number of a rank among those of all replicas."""
        return rank if self.replica is None else self.replica * self.ranks + rank


class Process(Protocol):
    """A rank's process: what the launcher uses of ``subprocess.Popen``."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""

    def wait(self) -> int | None:
        """The exit code, after the end of the process."""


@dataclass(frozen=True)
class Failed:
    """The failure of an attempt.

    Attributes:
        headline: Who is to blame, for what.
        said: The exception; empty for a process that ended without a word.
        step: The step that the rank to blame was in, counted over restarts if the script uses ``weft.checkpoints``;
            0 before the first, None if weft knows nothing of steps.
        saves: How many checkpoints had appeared in this attempt.
        code: The exit code that it deserves.
    """

    headline: str
    said: str
    step: int | None
    saves: int
    code: int


def usable_cores() -> int:
    """The number of processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
