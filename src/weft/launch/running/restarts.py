"""Starts a job again after it failed: whether and when, and the last report of all its attempts."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.config import resolve
from weft.errors import ConfigError, WeftError
from weft.launch.local import Launcher, heeded
from weft.launch.root_cause import signal_name
from weft.launch.running.job import Failed, Job
from weft.launch.running.replicas import Replicas
from weft.terminal_text import visible
from weft.units import format_seconds

FIRST_S, LONGEST_S = 1.0, 60.0
SAME = 3
"""So many failures in a row that are the same one end the job."""
WRONG_USE = 2
"""The exit code of a command that was called wrongly."""


@dataclass(frozen=True)
class Attempt:
    """One start of the job: how long it ran, and how it failed, if it did."""

    seconds: float
    failed: Failed | None


def backoff_s(restart: int) -> float:
    """Seconds to wait before a restart, after so many failures in a row.

    >>> [backoff_s(restart) for restart in (1, 2, 3, 7, 5000)]
    [1.0, 2.0, 4.0, 60.0, 60.0]
    """
    return min(LONGEST_S, FIRST_S * 2.0 ** min(restart - 1, 10))


def in_a_row(failures: Sequence[Failed]) -> int:
    """The number of last failures that came one after the other with no save between: a save is progress."""
    row = 0
    for failed in reversed(failures):
        row += 1
        if failed.saves:
            break
    return row


def is_same(before: Failed, now: Failed) -> bool:
    """True if a failure is the one before, come back with nothing gained between."""
    if now.saves or now.step != before.step:
        return False
    return now.step is not None or (now.said == before.said and bool(now.said))


def reason_to_stop(failures: Sequence[Failed], restarts: int) -> str:
    """Why a job is not started again after these failures; empty if it is.

    ``restarts``: how often it may be.
    """
    last = failures[-1]
    if last.code == WRONG_USE and not last.step:
        return "exit code 2 before the first step means wrong use, which a restart cannot mend"
    row = failures[-SAME:]
    if len(row) == SAME and all(is_same(before, now) for before, now in zip(row, row[1:], strict=False)):
        where = f"step {last.step}" if last.step else "before the first step"
        return f"no progress in {SAME} attempts, which all failed {'in ' if last.step else ''}{where}"
    if len(failures) > restarts:
        return f"all {restarts} restarts are used up (--max-restarts {restarts})"
    return ""


def report(attempts: Sequence[Attempt], restarts: int, end: str) -> str:
    """The report of a job that was started again, as lines. ``end``: why it is over, or how."""
    lines = [f"weft: {len(attempts) - 1} of {restarts} restarts; {end}"]
    for number, attempt in enumerate(attempts):
        failed = attempt.failed
        where = f" step {failed.step}," if failed is not None and failed.step else ""
        how = "ended" if failed is None else failed.headline
        lines.append(f"  attempt {number}:{where} after {format_seconds(attempt.seconds)}: {how}")
    return "\n".join(lines)


_TICK_S = 0.05


def run(job: Job, wait: Callable[[float], int] | None = None) -> int:
    """Runs a job to its end, with up to ``job.restarts`` restarts, and returns the exit code for the launcher.

    ``wait`` lets so many seconds pass and gives the number of a signal that ended them, or 0.
    """
    try:
        code = _attempts(job, wait or wait_for_signal)
    except WeftError:
        job.journal.note("ended", code=WRONG_USE)
        raise
    job.journal.note("ended", code=code)
    return code


def _attempts(job: Job, wait: Callable[[float], int]) -> int:
    attempts: list[Attempt] = []
    while True:
        began = time.monotonic()
        started = Replicas if job.replica_ranks else Launcher
        with started(replace(job, attempt=len(attempts))) as launcher:
            code = launcher.run()
        attempts.append(Attempt(time.monotonic() - began, launcher.failed))
        failures = [attempt.failed for attempt in attempts if attempt.failed is not None]
        if launcher.failed is None:
            return _end(job, attempts, code, f"exit code {code}")
        job, reason = without(job, launcher.gone)
        reason = reason_to_stop(failures, job.restarts) or reason
        if reason:
            return _end(job, attempts, code, reason)
        seconds = backoff_s(in_a_row(failures))
        _say(f"weft: restart {len(attempts)} of {job.restarts} in {format_seconds(seconds)}")
        job.journal.note("restart", number=len(attempts), seconds=seconds)
        number = wait(seconds)
        if number:
            return _end(job, attempts, 128 + number, f"{signal_name(number)} before the next one")


def without(job: Job, gone: Sequence[str]) -> tuple[Job, str]:
    """The job on the hosts that are left, if it may go on so, and why it may not; the whole job if hosts come back."""
    if not gone or not job.least_hosts:
        return job, ""
    left = [host for host in job.hosts if host.name not in gone]
    lost = visible(", ".join(gone))
    if len(left) < job.least_hosts:
        return job, f"without {lost} there are {len(left)} hosts (--min-hosts {job.least_hosts})"
    ranks = job.ranks // len(job.hosts) * len(left)
    try:
        resolve(None, job.environ, ranks)
    except ConfigError as error:
        return job, f"without {lost} there are {ranks} ranks, which the settings do not fit: {error}"
    _say(f"weft: goes on without {lost}: {ranks} ranks on {visible(', '.join(host.name for host in left))}")
    job.journal.note("hosts", left=[host.name for host in left], ranks=ranks)
    return replace(job, hosts=left, ranks=ranks), ""


def wait_for_signal(seconds: float) -> int:
    """The signal to stop that comes within so many seconds, or 0."""
    heard: list[int] = []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in heeded()}
    deadline = time.monotonic() + seconds
    try:
        while not heard and time.monotonic() < deadline:
            time.sleep(_TICK_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return heard[0] if heard else 0


def _end(job: Job, attempts: list[Attempt], code: int, end: str) -> int:
    if len(attempts) > 1:
        _say(report(attempts, job.restarts, end))
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
