"""`weft status`: what the folder of a job says of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from weft.launch.journal.job_status import read


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="what a job does that was started with --log-dir",
        description="Says whether a job runs, its ranks, and why its attempts failed.",
    )
    add_folder(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, with all events since the job's start")
    parser.set_defaults(handler=main)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The folder, for all commands about a job."""
    parser.add_argument("folder", metavar="FOLDER", help="what weft run --log-dir was given")


def main(options: argparse.Namespace) -> int:
    told = read(Path(options.folder))
    if not options.json:
        print("\n".join(told.lines()))
        return 0
    values = {
        "running": bool(told.pid),
        "code": told.code,
        "failure": told.failure,
        "step": told.step,
        "files": told.standing.as_dict(),
    }
    print(json.dumps({**values, "run": told.run, "events": told.events}, indent=1))
    return 0
