"""`weft status`, `weft logs`, `weft stop`: what the folder of a job says of it, and how it is ended."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from weft.cli.options import count
from weft.errors import LaunchError
from weft.launch.journal.job_status import SAVE_S, JobStatus, launcher_of, read, stop
from weft.launch.journal.journal import attempts, log_file, log_files, reader
from weft.terminal_text import LINES, visible
from weft.untrusted import shown_path, translated


def add_parser(commands: Any) -> None:
    _add_status(commands)
    _add_logs(commands)
    _add_stop(commands)


def _add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="what a job does that was started with --log-dir",
        description="Says whether a job runs, its ranks, and why its attempts failed.",
    )
    _add_folder(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, with all events since the job's start")
    parser.set_defaults(handler=show_status)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="what weft run --log-dir was given")


def show_status(options: argparse.Namespace) -> int:
    status = read(Path(options.folder))
    if not options.json:
        print("\n".join(status.lines()))
        return 0
    values = {
        "running": bool(status.pid),
        "code": status.code,
        "failure": status.failure,
        "step": status.step,
        "files": status.standing.as_dict(),
    }
    print(json.dumps({**values, "run": status.run, "events": status.events}, indent=1))
    return 0


_TICK_S = 0.1
_PART_BYTES = 1 << 16


def _add_logs(commands: Any) -> None:
    parser = commands.add_parser(
        "logs",
        help="what a rank of a job has written, started with --log-dir",
        description="Prints what one rank has written since its job was started last.",
    )
    _add_folder(parser)
    parser.add_argument("--rank", metavar="R", type=count, default=0, help="which rank (default: 0)")
    parser.add_argument(
        "--attempt", metavar="N", type=count,
        help="which start, by the number of its folder attempt-N (default: the newest)",
    )  # fmt: skip
    parser.add_argument("--follow", action="store_true", help="go on until the job ends, over its restarts")
    parser.set_defaults(handler=show_logs)


def show_logs(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    status = read(folder)
    ranks = status.run.get("ranks")
    found = attempts(folder)
    if not found:
        raise LaunchError(f'"{shown_path(folder)}" has no logs: the job has not started any rank')
    attempt = found[-1] if options.attempt is None else options.attempt
    if attempt not in found:
        raise LaunchError(
            f'"{shown_path(folder)}" has no attempt-{attempt}: there are {found[0]} to {found[-1]}'
        )
    if isinstance(ranks, int) and options.rank >= ranks:
        path = log_file(folder, attempt, options.rank)
        raise LaunchError(f'there is no "{shown_path(path)}": the job has no such rank')
    show = partial(_show, sys.stdout)
    with suppress(KeyboardInterrupt):  # who follows has seen enough
        _all(options, folder, status, attempt, show)
    return 0


def _all(
    options: argparse.Namespace, folder: Path, status: JobStatus, attempt: int, show: Callable[[bytes], None]
) -> None:
    """The log of an attempt, and of those that come while it is followed."""
    while True:
        _print(
            partial(log_files, folder, attempt, options.rank),
            show,
            partial(_over, folder, status, attempt, options.follow),
        )
        later = [number for number in attempts(folder) if number > attempt]
        if not options.follow or options.attempt is not None or not later:
            return
        attempt = later[0]


def _over(folder: Path, status: JobStatus, attempt: int, follow: bool) -> bool:
    """True if nothing more comes into the logs of an attempt."""
    if not follow or attempts(folder)[-1] > attempt:
        return True
    return read(folder).code is not None if status.handed_in else not launcher_of(folder, status.run)


def _print(paths: Callable[[], list[Path]], show: Callable[[bytes], None], over: Callable[[], bool]) -> None:
    """All of the files, as they come and grow, until it is over."""
    files: dict[Path, BinaryIO] = {}
    with ExitStack() as stack:
        while True:
            last = over()  # asked before the last look, so that nothing is missed
            for path in paths():
                if path not in files and path.exists():
                    with translated(f'"{shown_path(path)}" cannot be read', LaunchError):
                        files[path] = stack.enter_context(reader(path))
            for path, file in files.items():
                with translated(f'"{shown_path(path)}" cannot be read', LaunchError):
                    while data := file.read(_PART_BYTES):
                        show(data)
            if last:
                break
            time.sleep(_TICK_S)
    if not files:
        raise LaunchError(f'there is no "{shown_path(paths()[0])}": this rank has not begun')


def _show(out: Any, data: bytes) -> None:
    """To a terminal without what steers it; else as it is."""
    if out.isatty():
        out.write(visible(data.decode(errors="replace"), LINES + "\r"))
    else:
        out.flush()
        out.buffer.write(data)
    out.flush()


def _add_stop(commands: Any) -> None:
    parser = commands.add_parser(
        "stop",
        help="end a job that was started with --log-dir",
        description="Asks a job on this machine to save and end, ends it if it takes too long, and then kills it.",
    )
    _add_folder(parser)
    parser.add_argument(
        "--wait", metavar="SECONDS", type=count, default=int(SAVE_S),
        help=f"how long the job may take to save (default: {SAVE_S:.0f}); 0 ends it at once",
    )  # fmt: skip
    parser.set_defaults(handler=stop_job)


def stop_job(options: argparse.Namespace) -> int:
    status = stop(Path(options.folder), options.wait, lambda text: print(f"weft stop: {text}", flush=True))
    print(
        f"weft stop: it ended, exit code {status.code}"
        if status.code is not None
        else "weft stop: it is gone"
    )
    return 0
