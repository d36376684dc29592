"""The same measured by fio (Jens Axboe's, GPL), where it is installed: a second opinion. It reads only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import FormatError
from weft.measure.files import Held
from weft.untrusted import parse_json

FILES = 50
"""So many of the largest files fio is given."""


class FioRate(NamedTuple):
    """A rate measured by fio: its pattern, how many readers, bytes a second in all."""

    pattern: str
    readers: int
    bytes_per_s: float


def is_there() -> bool:
    """True if fio is installed."""
    return shutil.which("fio") is not None


def arguments(files: Sequence[Held], pattern: str, readers: int, seconds: float, block: int) -> list[str]:
    """The command: reads of `block` bytes, in a row or at random, after the system has forgotten the files."""
    largest = sorted(files, key=lambda held: -held.size)[:FILES]
    names = ":".join(held.path.replace("\\", "\\\\").replace(":", "\\:") for held in largest)
    return [
        "fio", "--name=weft", f"--filename={names}", "--readonly", "--allow_file_create=0", "--invalidate=1",
        f"--rw={'read' if pattern == 'in a row' else 'randread'}", f"--bs={block}", f"--numjobs={readers}", "--thread",
        "--group_reporting", "--time_based", f"--runtime={max(1, round(seconds))}", "--ioengine=psync",
        "--output-format=json",
    ]  # fmt: skip


def measure(files: Sequence[Held], pattern: str, readers: int, seconds: float, block: int) -> FioRate | None:
    """The rate that fio measures; None if it fails, for example on a file system that it does not know."""
    command = arguments(files, pattern, readers, seconds, block)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * 5 + 60, check=False)
        found = parse_json(done.stdout[done.stdout.index("{") :], "fio's answer is no JSON")
        return FioRate(pattern, readers, float(found["jobs"][0]["read"]["bw_bytes"]))
    except (OSError, ValueError, LookupError, TypeError, FormatError, subprocess.TimeoutExpired):
        return None
