"""The status that a rank under `weft run` reports to its launcher before `weft.init`, and after its end."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType, TracebackType

from weft.errors import LaunchError, is_weft
from weft.untrusted import whole
from weft.watch import statement
from weft.watch.failure import Failure
from weft.watch.heartbeat import Page, Sign, State
from weft.watch.process import exit_now

BEFORE = "its start, before weft.init"
INSIDE = "weft.init"
AFTER = "its end, after weft.shutdown"
_processes: dict[int, int | None] = {}
"""Those that are ranks, and which."""


def report_uncaught(rank: int | None = None) -> None:
    """From now on an exception that nobody catches is written down for the launcher, which shows it.

    ``rank``: this process's, where it is known by then.
    """
    _processes[os.getpid()] = rank
    if rank is not None:
        statement.forget(rank)
    sys.excepthook = report
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def leave_interrupts() -> None:
    """From now on SIGINT raises a KeyboardInterrupt wherever it comes, as Python has it."""
    if signal.getsignal(signal.SIGINT) is _interrupted:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ends a rank that is importing: 1 in 30 interrupts of `import torch` got lost there, in some `except:` or
    in C code that drops exceptions, and the job went on."""
    error = KeyboardInterrupt()
    if os.getpid() in _processes and _is_importing(frame):
        report(KeyboardInterrupt, error, None)
        exit_now(130)
    raise error


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook. A process that a rank has forked is no rank: its errors are shown as ever."""
    descriptor, rank = (whole(os.environ.get(name, "")) for name in ("WEFT_SHARED_FD", "RANK"))
    if os.getpid() in _processes and descriptor is not None and rank is not None:
        if issubclass(kind, KeyboardInterrupt):
            exit_now(130)
        with suppress(LaunchError, ValueError, IndexError):
            page = Page.attach(descriptor)
            started = page.sign(rank).state is not State.ABSENT
            failure = Failure.of(error, rank, _sign(trace, started))
            page.write_report(rank, failure.to_json(page.report_limit))
            return
    place = _processes.get(os.getpid())
    if place is not None:
        statement.own(Failure.of(error, place, _sign(trace)))
    sys.__excepthook__(kind, error, trace)


def _sign(trace: TracebackType | None, started: bool = False) -> Sign:
    """Where that was in the life of a process that is not under watch; ``started``: it was before."""
    frames = traceback.extract_tb(trace)
    inside = any(frame.name == "init" and is_weft(frame.filename) for frame in frames)
    return Sign(phase=INSIDE if inside else AFTER if started else BEFORE)


def report_exit(code: object) -> None:
    """This process ends itself by `SystemExit`, with this code."""
    place = _processes.get(os.getpid())
    if place is not None and code not in (None, 0, os.EX_TEMPFAIL):
        statement.ended(place, code if isinstance(code, int) else 1)
