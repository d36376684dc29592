"""`weft logs`: what one rank of a job has written, and what it goes on to write."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.cli.jobs.status import add_folder
from weft.cli.machine import count
from weft.errors import LaunchError
from weft.foreign import shown_path, translated
from weft.launch.journal.files import attempts, log_file, reader
from weft.launch.journal.told import launcher_of, read
from weft.visible import LINES, visible

_TICK_S = 0.1
_PART_BYTES = 1 << 16


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "logs",
        help="what a rank of a job has written, started with --log-dir",
        description="Prints what one rank has written since its job was started last.",
    )
    add_folder(parser)
    parser.add_argument("--rank", metavar="R", type=count, default=0, help="which rank (default: 0)")
    parser.add_argument(
        "--attempt", metavar="N", type=count,
        help="which start, by the number of its folder attempt-N (default: the newest)",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="go on until the job ends, over its restarts")
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    run = read(folder).run
    found = attempts(folder)
    if not found:
        raise LaunchError(f'"{shown_path(folder)}" has no logs: the job has not started any rank')
    attempt = found[-1] if options.attempt is None else options.attempt
    if attempt not in found:
        raise LaunchError(
            f'"{shown_path(folder)}" has no attempt-{attempt}: there are {found[0]} to {found[-1]}'
        )
    show = partial(_show, sys.stdout)
    with suppress(KeyboardInterrupt):  # who follows has seen enough
        _all(options, folder, run, attempt, show)
    return 0


def _all(
    options: argparse.Namespace, folder: Path, run: Any, attempt: int, show: Callable[[bytes], None]
) -> None:
    """The log of an attempt, and of those that come while it is followed."""
    while True:
        _print(
            log_file(folder, attempt, options.rank),
            show,
            partial(_over, folder, run, attempt, options.follow),
        )
        later = [number for number in attempts(folder) if number > attempt]
        if not options.follow or options.attempt is not None or not later:
            return
        attempt = later[0]


def _over(folder: Path, run: Any, attempt: int, follow: bool) -> bool:
    """Whether nothing more comes into the logs of an attempt."""
    return not follow or attempts(folder)[-1] > attempt or not launcher_of(folder, run)


def _print(path: Path, show: Callable[[bytes], None], over: Callable[[], bool]) -> None:
    """All of a file, as it grows, until it is over."""
    if not path.exists():
        raise LaunchError(f'there is no "{shown_path(path)}": the job has no such rank')
    with translated(f'"{shown_path(path)}" cannot be read', LaunchError), reader(path) as file:
        while True:
            last = over()  # asked before the last look, so that nothing is missed
            while data := file.read(_PART_BYTES):
                show(data)
            if last:
                return
            time.sleep(_TICK_S)


def _show(out: Any, data: bytes) -> None:
    """To a terminal without what steers it; else as it is."""
    if out.isatty():
        out.write(visible(data.decode(errors="replace"), LINES + "\r"))
    else:
        out.flush()
        out.buffer.write(data)
    out.flush()
