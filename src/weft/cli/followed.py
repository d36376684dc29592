"""A job that `weft run` starts elsewhere and follows from here, as if it ran here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from weft.errors import JobError, LaunchError, WeftError
from weft.launch.job import Job
from weft.launch.local import heeded
from weft.launch.root_cause import signal_name
from weft.launch.started.cluster import INSTALL, is_installed
from weft.launch.started.kubernetes import KubernetesHandle
from weft.terminal_text import LINES, visible

_SAVE_S = 30.0
"""How long pods may take to end by themselves; Kubernetes gives them as much."""


def follow(job: Job) -> int:
    """Starts a job on Kubernetes, prints what rank 0's pod writes, and gives the exit code; a signal deletes the job.

    Raises:
        LaunchError: It was not started.
    """
    if not is_installed():
        print(job.plan())
        raise LaunchError(f"nothing was started, as the package kubernetes is not installed: {INSTALL}")
    with _signals() as heard:
        handle = job.start()
        assert isinstance(handle, KubernetesHandle)
        _say(f"created {job.name} in the namespace {handle.cluster.namespace}; Ctrl-C deletes it")
        try:
            code = handle.follow(_print, _say, lambda: bool(heard))
        except JobError as error:
            _say(str(error))
            code = error.code
            _leave(handle)
        except BaseException:  # nobody reads the output any more, say
            _leave(handle)
            raise
        if code is not None:
            return code
        _say(f"{signal_name(heard[0])}: deletes {job.name}")
        try:
            handle.stop(_SAVE_S)
        except TimeoutError:
            _say(f"{job.name} is still being deleted")
        return 128 + heard[0]


def _leave(handle: KubernetesHandle) -> None:
    """Deletes a job that has not come to its end, as nobody follows it any more."""
    if not handle.ended:
        with suppress(WeftError, TimeoutError):
            handle.stop(0)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals to stop that have come; after the first one the next ones act as ever."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {number: signal.getsignal(number) for number in heeded()}
    for number in before:
        signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(line: str) -> None:
    print(line, flush=True)


def _say(text: str) -> None:
    print(f"weft: {visible(text.removeprefix('weft: '), LINES)}", file=sys.stderr, flush=True)
