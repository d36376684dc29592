"""Starts a job again after it failed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from weft.launch.culprit import signal_name
from weft.launch.local import STOPPING, Launcher
from weft.launch.running.job import Job
from weft.launch.running.restarts import Attempt, backoff_s, in_a_row, reason_to_stop, told
from weft.units import format_seconds

_TICK_S = 0.05


def run(job: Job, wait: Callable[[float], int] | None = None) -> int:
    """Runs a job to its end, with up to ``job.restarts`` restarts, and returns the exit code for the launcher.

    ``wait`` lets so many seconds pass and gives the number of a signal that ended them, or 0.
    """
    attempts: list[Attempt] = []
    while True:
        began = time.monotonic()
        with Launcher(replace(job, attempt=len(attempts))) as launcher:
            code = launcher.run()
        attempts.append(Attempt(time.monotonic() - began, launcher.failed))
        failures = [attempt.failed for attempt in attempts if attempt.failed is not None]
        if launcher.failed is None:
            return _end(job, attempts, code, f"exit code {code}")
        reason = reason_to_stop(failures, job.restarts)
        if reason:
            return _end(job, attempts, code, reason)
        seconds = backoff_s(in_a_row(failures))
        _say(f"weft: restart {len(attempts)} of {job.restarts} in {format_seconds(seconds)}")
        number = (wait or wait_for_signal)(seconds)
        if number:
            return _end(job, attempts, 128 + number, f"{signal_name(number)} before the next one")


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
