"""The page of a recording, written again and again while the job runs, and once more at its end."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.cli.draw import partial_file
from weft.cli.live import PAGE
from weft.untrusted import listed, reason, shown_path

EVERY_S = 30.0
LONGEST_S = 600.0
"""A page that takes longer is given up."""
_WRITE = """\
import os, sys
from pathlib import Path
os.nice(10)
from weft.cli.report import write_page
write_page(Path(sys.argv[1]))
"""


@contextmanager
def fresh_page(folder: Path, every_s: float = EVERY_S) -> Iterator[None]:
    """Inside, a job records into a folder: the page there is written every so often, beside it, and when it has ended.

    A page that cannot be written is a warning; the job and its exit code stay what they are.
    """
    over, before = threading.Event(), recording_files(folder)

    def repeat() -> None:
        while not over.wait(every_s):
            if recording_files(folder) != before:
                _write_beside(folder, over)

    thread = threading.Thread(target=repeat, name="weft-page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _write_last(folder, before)


def recording_files(folder: Path) -> dict[str, int]:
    """The ranks' files in a folder, with when each was written last: those of an earlier job until this one records."""
    found = {}
    for path in folder.glob("rank*"):
        with suppress(FileNotFoundError):  # the first rank removes what an earlier job left
            found[path.name] = path.stat().st_mtime_ns
    return found


def not_here(folder: Path, before: Mapping[str, int], ranks: int) -> str:
    """Of which ranks this job's recording is not in the folder, as it is on this machine; empty if of none.

    Ranks on other hosts write at the same path there, and weft's launcher has brought what it could.
    """
    now = recording_files(folder)
    new = {name for name, time_ns in now.items() if before.get(name) != time_ns}
    found = {re.split(r"\D", name.removeprefix("rank"), maxsplit=1)[0] for name in new}
    missing = [str(rank) for rank in range(ranks) if str(rank) not in found]
    if not missing:
        return ""
    return (
        f"{shown_path(folder)} on this machine has no recording of rank {listed(missing)}, and none came from their "
        "hosts: name a folder that all hosts share, or copy their files there"
    )


def nothing_recorded(folder: Path) -> str:
    """The message about a job that recorded nothing."""
    return f"this job recorded nothing into {shown_path(folder)}: the script never called weft.init"


def _write_beside(folder: Path, over: threading.Event, longest_s: float = LONGEST_S) -> None:
    """Write the page in a process of low priority; it is ended if the job is over before, or if it takes too long."""
    deadline_s = time.monotonic() + longest_s
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if over.wait(0.2) or time.monotonic() > deadline_s:
            process.kill()
    process.wait()
    partial_file(folder.resolve() / PAGE, process.pid).unlink(missing_ok=True)  # of one that was killed


def _write_last(folder: Path, before: dict[str, int]) -> None:
    if recording_files(folder) == before:
        print(f"weft: {nothing_recorded(folder)}", file=sys.stderr)
        return
    try:
        from weft.cli.report import write_page

        write_page(folder)
    except Exception as error:
        print(f"weft: the page of {shown_path(folder)} cannot be written: {reason(error)}", file=sys.stderr)
