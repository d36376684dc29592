"""Puts faults into a copy of the source, one at a time, runs the tests of their rooms, and counts what is caught.

    python -m tests.seeded                          all faults, with what `make test` runs; the working tree stays
    python -m tests.seeded --long                   those that are missed once more, with the long tests of their rooms
    python -m tests.seeded --only torch/clip        of these rooms alone; any number
    python -m tests.seeded --of /path/to/checkout   the tests of another checkout, such as one before a change

A fault is caught if a test fails; the table has the first one that does. Which cases `make test` runs is drawn by the
day, and so is what it catches.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.seeded.faults import FAULTS, Fault
from tests.suite.__main__ import TENSORFLOW
from tests.suite.rooms import of_room

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0
"""A room's tests take a minute; a fault that makes ranks wait ends by the tests' own limits, or here."""


@dataclass(frozen=True)
class Outcome:
    """The verdict of the tests of a fault's room."""

    fault: Fault
    caught_by: str
    """The first test that failed, or that the tests did not end; empty: none noticed."""
    seconds: float
    by_long: bool = False

    def row(self) -> str:
        """The line of the table."""
        by = self.caught_by.replace("|", "\\|") or "**missed**"
        return f"| {self.fault.room} | {self.fault.effect} | {by}{' (long)' * self.by_long} | {self.seconds:.0f} s |"


@contextmanager
def copied(checkout: Path) -> Iterator[Path]:
    """A copy of what git knows of a checkout, in a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="weft-seeded-") as name:
        for path in filter(None, listed.split("\0")):
            if (checkout / path).is_file():
                (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / path, Path(name) / path)
        shutil.copytree(checkout / ".git", Path(name) / ".git", symlinks=True)
        yield Path(name)


@contextmanager
def put_into(tree: Path, fault: Fault) -> Iterator[None]:
    """A fault in a tree, inside; the file is as before after it."""
    path = tree / "src" / "weft" / fault.file
    text = path.read_text(encoding="utf-8")
    assert text.count(fault.old) == 1, (
        f"{fault.file}: {fault.old!r} stands there {text.count(fault.old)} times"
    )
    try:
        path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def judged(tree: Path, fault: Fault, long: bool = False) -> Outcome:
    """The verdict of the tests of the fault's room, in the tree."""
    began = time.monotonic()
    with put_into(tree, fault):
        caught_by = _first_failure(tree, fault.room, long)
    return Outcome(fault, caught_by, time.monotonic() - began, long)


def _first_failure(tree: Path, room: str, long: bool) -> str:
    paths = [path for path in of_room(room) if (tree / path).exists()]
    keras = [path for path in paths if any(f"{path}/".startswith(f"{each}/") for each in TENSORFLOW)]
    for some in (keras, [path for path in paths if path not in keras]):
        failed = _run(tree, some, long) if some else ""
        if failed:
            return failed
    return ""


def _run(tree: Path, paths: Sequence[str], long: bool) -> str:
    """The first test that fails among those of `paths`."""
    spread = ["-n", str(min(3, len(paths))), "--dist", "loadfile", "--no-loadscope-reorder"]
    ignored = [f"--ignore={path}" for path in TENSORFLOW if path not in paths]
    chosen = [] if long else ["-m", "not long"]
    environ = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "OMP_NUM_THREADS": "1",
    }
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *spread]
    command = subprocess.Popen(
        [*pytest, *chosen, *ignored, *paths], cwd=tree, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        told = command.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(command.pid, 9)
        command.communicate()
        return f"no end within {LIMIT_S:.0f} s"
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
    if command.returncode in (0, 5):
        return ""
    return first[1] if first else f"exit code {command.returncode}: {told.strip().splitlines()[-1][:80]}"


def main() -> int:
    """Prints a line for each fault, and how many were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", action="append", metavar="ROOM", help="faults of this room; any number")
    parser.add_argument("--long", action="store_true", help="try what is missed with the long tests, too")
    parser.add_argument("--of", type=Path, default=ROOT, metavar="CHECKOUT", help="whose tests and source")
    given = parser.parse_args()
    known = [fault.room for fault in FAULTS]
    if unknown := sorted({*(given.only or ())} - {*known}):
        parser.error(f"no fault is seeded in {', '.join(unknown)}; there are: {', '.join(known)}")
    outcomes = []
    print("| room | the fault | caught by | after |\n| --- | --- | --- | ---: |", flush=True)
    with copied(given.of.resolve()) as tree:
        for fault in FAULTS:
            if given.only and fault.room not in given.only:
                continue
            outcome = judged(tree, fault)
            if given.long and not outcome.caught_by:
                outcome = judged(tree, fault, long=True)
            outcomes.append(outcome)
            print(outcome.row(), flush=True)
    caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    print(f"\n{caught} of {len(outcomes)} faults caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
