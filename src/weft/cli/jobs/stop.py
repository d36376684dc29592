"""`weft stop`: ends a job from another terminal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from weft.cli.jobs.status import add_folder
from weft.cli.options import count
from weft.launch.journal.job_status import SAVE_S, stop


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "stop",
        help="end a job that was started with --log-dir",
        description="Asks a job on this machine to save and end, ends it if it takes too long, and then kills it.",
    )
    add_folder(parser)
    parser.add_argument(
        "--wait", metavar="SECONDS", type=count, default=int(SAVE_S),
        help=f"how long the job may take to save (default: {SAVE_S:.0f}); 0 ends it at once",
    )  # fmt: skip
    parser.set_defaults(handler=main)


def main(options: argparse.Namespace) -> int:
    told = stop(Path(options.folder), options.wait, lambda text: print(f"weft stop: {text}", flush=True))
    print(f"weft stop: it ended, exit code {told.code}" if told.code is not None else "weft stop: it is gone")
    return 0
