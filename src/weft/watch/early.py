"""What a rank under `weft run` tells its launcher while it is not under watch: before `weft.init`, after its end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from types import TracebackType

from weft.errors import LaunchError
from weft.foreign import whole
from weft.watch.failure import Failure
from weft.watch.heartbeat import Page, Sign, State
from weft.watch.process import exit_now

BEFORE = "its start, before weft.init"
AFTER = "its end, after weft.shutdown"
_processes: set[int] = set()


def report_uncaught() -> None:
    """From now on an exception that nobody catches is written down for the launcher, which shows it."""
    _processes.add(os.getpid())
    sys.excepthook = report


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The hook. A process that a rank has forked is no rank: its errors are shown as ever."""
    descriptor, rank = (whole(os.environ.get(name, "")) for name in ("WEFT_SHARED_FD", "RANK"))
    if os.getpid() in _processes and descriptor is not None and rank is not None:
        if issubclass(kind, KeyboardInterrupt):
            exit_now(130)
        with suppress(LaunchError, ValueError, IndexError):
            page = Page.attach(descriptor)
            started = page.sign(rank).state is not State.ABSENT
            failure = Failure.of(error, rank, Sign(phase=AFTER if started else BEFORE))
            page.write_report(rank, failure.to_json(page.report_limit))
            return
    sys.__excepthook__(kind, error, trace)
