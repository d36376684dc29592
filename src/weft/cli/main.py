"""The entry of the `weft` command."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import weft
from weft.cli import (
    check,
    doctor,
    draw,
    jobs,
    partition,
    plan,
    rehearse,
    report,
    run,
    simulate,
    trace,
    verify,
)
from weft.cli.live import top
from weft.cli.plan import storage, tune
from weft.errors import WeftError
from weft.terminal_text import LINES, keep_log_visible, visible
from weft.untrusted import cut

LONGEST = 1800
"""Characters of an error that are printed; more of them come from what was given."""


def printable(text: str) -> str:
    """An error as it is printed: what was given may be long, or steer a terminal."""
    return cut(visible(text, LINES), LONGEST)


class _Parser(argparse.ArgumentParser):
    """Prints a mistake in one line, without the usage.

    Options are written in full: else a script's own option, `--rank`, would be taken for a short form of weft's.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code."""
    _open_streams()
    keep_log_visible()
    parser = _Parser(prog="weft", description="Trains one model on many devices.")
    parser.add_argument("--version", action="version", version=f"weft {weft.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (
        run,
        jobs,
        doctor,
        report,
        top,
        verify,
        check,
        rehearse,
        plan,
        tune,
        storage,
        trace,
        partition,
        simulate,
        draw,
    ):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code = int(options.handler(options))
        sys.stdout.flush()
        return code
    except WeftError as error:
        print(f"weft {options.command}: error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # at a moment when a command has nothing to end any more, or not yet
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _open_streams() -> None:
    """Gives a command that was started without standard streams empty ones; texts that an encoding lacks show as `?`.

    Else the next file that is opened would count as the standard input.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _nobody_reads() -> bool:
    """True if who read the output has seen enough, as `head` has."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are printed in any case
    return any(events & select.POLLERR for _, events in poll.poll(0))
