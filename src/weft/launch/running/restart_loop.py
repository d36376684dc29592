"""Starts a job again after it failed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.config import resolve
from weft.errors import ConfigError, WeftError
from weft.launch.local import STOPPING, Launcher
from weft.launch.root_cause import signal_name
from weft.launch.running.job import Job
from weft.launch.running.restarts import WRONG_USE, Attempt, backoff_s, in_a_row, reason_to_stop, told
from weft.terminal_text import visible
from weft.units import format_seconds

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
        with Launcher(replace(job, attempt=len(attempts))) as launcher:
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
    heeded = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in heeded}
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
        _say(told(attempts, job.restarts, end))
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
