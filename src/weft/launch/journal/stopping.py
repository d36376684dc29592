"""Ends a job from another process: asks its launcher, asks again, and kills it if that does nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from weft.errors import LaunchError
from weft.launch.journal.job_status import Told, launcher_of, read
from weft.units import format_seconds
from weft.untrusted import shown_path
from weft.watch.process import host_name

SAVE_S = 300.0
"""How long a job may take to save and end by itself."""
END_S = 15.0
"""How long it may take to end at once."""
_SECOND_S = 0.2
"""Between two signals that end a job at once."""
_TICK_S = 0.05


def stop(folder: Path, save_s: float = SAVE_S, say: Callable[[str], None] = lambda text: None) -> Told:
    """Ends the job of a folder, and gives what the folder says after that.

    A job that has saves goes on to the end of a step and saves; 0 seconds for that end it at once.

    Raises:
        LaunchError: No job runs with the folder, or not on this machine.
    """
    told = read(folder)
    pid = _launcher(told)
    for number, seconds, text in (
        (signal.SIGTERM, max(save_s, _SECOND_S), "asked to end"),
        (signal.SIGTERM, END_S, "told to end at once"),
        (signal.SIGKILL, END_S, "killed"),
    ):
        say(f"the job of {shown_path(folder)} is {text} (launcher pid {pid})")
        _signal(told, number)
        if _ends(told, seconds):
            return read(folder)
    raise LaunchError(
        f"the launcher (pid {pid}) still runs {format_seconds(END_S)} after SIGKILL: the system holds it back"
    )


def _launcher(told: Told) -> int:
    if told.pid:
        return told.pid
    where = shown_path(told.folder)
    if told.handed_in and told.code is None:
        raise LaunchError(f'Slurm has the job of "{where}": end it with scancel {told.handed_in}')
    if told.host not in ("", "?", host_name()):
        raise LaunchError(f'the job of "{where}" was started on {told.host}: run weft stop there')
    raise LaunchError(f'no job runs with "{where}": there is nothing to end')


def _signal(told: Told, number: int) -> None:
    """To the launcher, if it is still the same process."""
    if launcher_of(told.folder, told.run) == told.pid:
        with suppress(ProcessLookupError):
            os.kill(told.pid, number)


def _ends(told: Told, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while launcher_of(told.folder, told.run):
        if time.monotonic() > deadline:
            return False
        time.sleep(_TICK_S)
    return True
