"""Runs the tests of this repository; `make test` and its like call it.

    python -m tests.suite                          what `make test` runs
    python -m tests.suite --room torch/split       of that what belongs to a room of the source
    python -m tests.suite --changed [COMMIT]       of that what uses a file changed since the main branch, or a commit
    python -m tests.suite --long                   what `make test` leaves out
    python -m tests.suite --only integrations      trainers of other libraries and whole scripts, or TensorFlow
    python -m tests.suite -- tests/unit -k mesh    options of pytest: only these tests, with the long ones

Tests of TensorFlow run beside the others, in a pytest of their own: OR-Tools, which other tests use, does not survive
in one process with it. Each pytest prints its slowest tests; the last line tells what all took.
"""

from __future__ import annotations

import argparse
import atexit
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from tests import long, warm
from tests.suite.changes import NothingToCompareError, changed_files, touched
from tests.suite.rooms import of_room, rooms

ROOT = Path(__file__).resolve().parents[2]
SLOWEST = 20
NO_TESTS = 5
"""The exit code of a pytest that found no test to run: all of a file are long, say."""
SHORT = ("-m", "not long")
INTEGRATIONS = ("tests/integrations", "tests/scripts")
TENSORFLOW = (
    "tests/unit/tensorflow", "tests/parity/tensorflow", "tests/fault/test_tensorflow.py", "src/weft/tensorflow",
    "src/weft/compat/tensorflow", "src/weft/compat/stand_ins", "tests/unit/compat/test_tensorflow_names.py",
    "tests/fuzz/keras", "tests/fuzz/test_keras.py",
)  # fmt: skip


@dataclass(frozen=True)
class Session:
    """One pytest.

    Attributes:
        name: What it is called in messages.
        arguments: Paths and options.
        workers: Processes that run tests; 0: pytest's own.
    """

    name: str
    arguments: tuple[str, ...]
    workers: int = 0

    def command(self) -> list[str]:
        """The command that runs it."""
        spread = [
            "-n",
            str(self.workers),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "--max-worker-restart",
            "0",
        ]
        options = spread if self.workers else ["-p", "no:xdist"]
        options += [
            "-o",
            f"cache_dir=.pytest_cache/{self.name}",
        ]  # one of its own: two would overwrite each other's
        shown = ["--durations", str(SLOWEST), "--durations-min", "0.5"]
        return [sys.executable, "-m", "pytest", *options, *shown, *self.arguments]


def sessions(paths: Sequence[str], *options: str) -> list[Session]:
    """The sessions that run the tests of some files and folders; all but `INTEGRATIONS` without paths."""
    if not paths:
        ignored = [f"--ignore={path}" for path in (*INTEGRATIONS, *TENSORFLOW)]
        return [Session("general", (*ignored, *options), 3), Session("tensorflow", (*TENSORFLOW, *options))]
    inside = [path for path in paths if _within(path, TENSORFLOW)]
    general = [path for path in paths if path not in inside]
    ignored = [f"--ignore={path}" for path in TENSORFLOW if any(_within(path, [each]) for each in general)]
    found = []
    if general:
        files = all((ROOT / path.partition("::")[0]).is_file() for path in general)
        workers = min(3, len(general)) if files else 3
        found.append(Session("general", (*general, *ignored, *options), workers if workers > 1 else 0))
    if inside or ignored:
        more = [each.removeprefix("--ignore=") for each in ignored]
        found.append(Session("tensorflow", (*inside, *more, *options)))
    return found


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(f"{path}/".startswith(f"{folder}/") for folder in folders)


def run(wanted: Sequence[Session]) -> int:
    """Runs sessions side by side; 0 if all went well. The output of all but the first comes at their end."""
    # With it each process would compile weft anew, and each pytest rewrite its assertions: a tenth of the time.
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"OMP_NUM_THREADS": "1", long.SEED: long.seed(), warm.ADDRESS: warm.serve()}
    outputs: list[IO[str] | None] = [None, *(tempfile.TemporaryFile("w+") for _ in wanted[1:])]
    started = [
        subprocess.Popen(session.command(), cwd=ROOT, env=environ, stdout=output, stderr=output)
        for session, output in zip(wanted, outputs, strict=True)
    ]
    codes = []
    try:
        for process, output in zip(started, outputs, strict=True):
            codes.append(process.wait())
            _show(output)
    finally:
        for process in started:
            process.terminate()
    outcomes = [_outcome(session, code, environ) for session, code in zip(wanted, codes, strict=True)]
    return next(filter(None, outcomes), 0)


def _show(output: IO[str] | None) -> None:
    if output is not None:
        with output:
            output.seek(0)
            print(output.read(), flush=True)


def _outcome(session: Session, code: int, environ: Mapping[str, str]) -> int:
    """The exit code of a session. In CI what failed runs once more by itself, if all tests had run; both are told."""
    if code == NO_TESTS:
        return 0
    if code != 1 or environ.get("CI") != "true":
        return code
    print(f"{session.name}: once more, by itself, what failed above", flush=True)
    alone = replace(session, workers=0, arguments=(*session.arguments, "--last-failed"))
    again = subprocess.run(alone.command(), cwd=ROOT, env=environ).returncode
    outcome = (
        "failed twice" if again else "failed, then passed: see both runs above, and mend the test or weft"
    )
    print(f"{session.name}: {outcome}", flush=True)
    return again


def main() -> int:
    """Runs what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--room", help="a room of the source, such as torch/split")
    which.add_argument("--changed", nargs="?", const="", metavar="COMMIT", help="what a change can touch")
    which.add_argument("--long", action="store_true", help="what `make test` leaves out")
    which.add_argument("--only", choices=("tensorflow", "integrations"), help="all tests of these")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    given = parser.parse_args()
    wanted = _wanted(given, parser)
    # First, so that it runs last: the servers of `tests.warm`, which end at exit, have then been counted.
    atexit.register(_tell, time.monotonic())
    return run(wanted)


def _tell(began: float) -> None:
    """Prints what all took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    minutes, busy = (time.monotonic() - began) / 60, (used.ru_utime + used.ru_stime) / 60
    print(f"{minutes:.1f} minutes, {busy:.1f} of processor time; cases drawn by {long.SEED}={long.seed()}")


def _wanted(given: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Session]:
    options = tuple(given.pytest)
    if given.room:
        if given.room not in rooms():
            parser.error(f"there is no room {given.room}; there are {', '.join(rooms())}")
        return sessions(of_room(given.room), *SHORT, *options)
    if given.changed is not None:
        return _of_change(given.changed, parser, options)
    if given.only:
        paths = TENSORFLOW if given.only == "tensorflow" else (*INTEGRATIONS, *(() if options else SHORT))
        return [Session(given.only, (*paths, *options), 3)]
    if given.long:
        integrations = Session("integrations", (*INTEGRATIONS, "-m", "long", *options))
        return [*sessions([], "-m", "long", *options), integrations]
    if any(not option.startswith("-") and (ROOT / option.partition("::")[0]).exists() for option in options):
        paths = [each for each in options if (ROOT / each.partition("::")[0]).exists()]
        return sessions(paths, *(each for each in options if each not in paths))
    return sessions([], *(options or SHORT))


def _of_change(commit: str, parser: argparse.ArgumentParser, options: Sequence[str]) -> list[Session]:
    try:
        changed = changed_files(commit)
    except NothingToCompareError as error:
        parser.error(str(error))
    tests = touched(changed)
    if tests is None:
        return sessions([], *SHORT, *options)
    tests = [path for path in tests if not _within(path, INTEGRATIONS)]
    print(f"{len(changed)} files changed; {len(tests)} files of tests can tell", flush=True)
    return sessions(tests, *SHORT, *options) if tests else []


if __name__ == "__main__":
    sys.exit(main())
