"""The page of a recording, written again and again while the job runs, and once more at its end."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.foreign import reason, shown_path

EVERY_S = 30.0
LONGEST_S = 600.0
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

    A page that cannot be written is told; the job and its exit code stay what they are.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            if any(folder.glob("rank*")):
                _write_beside(folder, over)

    thread = threading.Thread(target=repeat, name="weft-page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _write_last(folder)


def _write_beside(folder: Path, over: threading.Event) -> None:
    """Write the page in a process of low priority; it is ended if the job is over before."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITE, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if over.wait(0.2):
            process.kill()
    process.wait()


def _write_last(folder: Path) -> None:
    if not any(folder.glob("rank*")):
        print(
            f"weft: {shown_path(folder)} has no recording: the script never called weft.init", file=sys.stderr
        )
        return
    try:
        writer = importlib.import_module("weft.cli.report")
        writer.write_page(folder)
    except Exception as error:
        print(f"weft: the page of {shown_path(folder)} cannot be written: {reason(error)}", file=sys.stderr)
