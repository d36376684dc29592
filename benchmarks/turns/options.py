"""What the command lines of all comparisons have alike."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path


def parser(program: str, text: str, rounds: int, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=text.splitlines()[0])
    parser.add_argument("--steps", type=int, default=steps, help="steps of one contender in one round")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="also write the figures and every step into this file")
    parser.add_argument(
        "--patience", type=float, default=20.0, help="seconds to wait for a quiet machine before each turn"
    )
    parser.add_argument("--small", action="store_true", help="tiny models: only to see that everything runs")
    return parser


def names(parser: argparse.ArgumentParser, text: str, known: Collection[str], what: str) -> list[str]:
    """The comma-separated names in `text`; an error of the command line for one that is not known."""
    found = text.split(",")
    unknown = [name for name in found if name not in known]
    if unknown:
        parser.error(f"no {what} named {', '.join(unknown)}; there are {', '.join(known)}")
    return found
