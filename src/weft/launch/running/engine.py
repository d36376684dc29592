"""Another engine's command as a child of this process, which says in the job's folder what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.errors import LaunchError
from weft.launch.journal.failure_report import failure
from weft.launch.journal.journal import Journal
from weft.launch.local import GO_ON, heeded
from weft.launch.root_cause import exit_code, signal_name
from weft.untrusted import shown_text
from weft.watch.process import die_with_parent

_FROM_TERMINAL = 0x80
"""Linux's mark of a signal that all processes of a terminal have got."""


def run(command: Sequence[str], environ: Mapping[str, str], journal: Journal, logs: Path, ranks: int) -> int:
    """Runs the command to its end, hands signals on to it, and gives the exit code for this launcher.

    Args:
        command: The program and its arguments.
        environ: Its environment.
        journal: Records of the job.
        logs: The folder of this attempt, where ranks leave what they have to say.
        ranks: How many there are.

    Raises:
        LaunchError: The command cannot be started.
    """
    awaited = {*heeded(), signal.SIGCHLD}
    parent, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, awaited)

    def in_child() -> None:
        die_with_parent(parent, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        try:
            child = subprocess.Popen(command, env=environ, preexec_fn=in_child)
        except OSError as error:
            raise LaunchError(f"{shown_text(command[0])} cannot be started: {error}") from error
        stopped = _wait(child, awaited, journal)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = exit_code(child.returncode) if child.returncode else 0
    if code not in (0, GO_ON) and not stopped:
        journal.fail(failure(logs, ranks, code))
    journal.note("ended", code=code)
    return code


def _wait(child: subprocess.Popen[bytes], awaited: set[signal.Signals], journal: Journal) -> bool:
    """True if the child was asked to end."""
    stopped = False
    while child.poll() is None:
        heard = signal.sigtimedwait(awaited, 0.5)
        if heard is None or heard.si_signo == signal.SIGCHLD:
            continue
        stopped = True
        journal.note("stopping", signal=signal_name(heard.si_signo))
        if heard.si_code != _FROM_TERMINAL:
            child.send_signal(heard.si_signo)
    return stopped
