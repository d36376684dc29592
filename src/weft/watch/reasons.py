"""Why a rank failed, where the exception says it in a roundabout way: errors of other processes and of allocators.

A worker of a DataLoader hands its exception on as a text with its whole traceback, of which the reason is the last
line. One that is killed is told in whatever line the rank happens to be.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from weft.errors import is_own
from weft.watch.frames import one_line, own_line

_HANDED_ON = re.compile(r"Caught (\w+) (in .+?)\.\nOriginal (Traceback.+)", re.DOTALL)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)\n(?: {4}(\S.*)\n)?', re.MULTILINE)
_KILLED = re.compile(r"DataLoader worker \(pid\D* \d[\d, ]*\) (?:is killed by signal: |exited unexpectedly)")
_MEMORY = re.compile(r"can't allocate memory|out of memory|Cannot allocate memory")
LESS_MEMORY = (
    'Less memory: smaller microbatches, more "partitions", "optimize": "memory", or activation checkpoints; '
    "docs/troubleshooting.md has more"
)
_ADVICE = (
    ("Bus error", "the shared memory is full: make /dev/shm larger (docker run --shm-size), or num_workers smaller"),
    ("Killed", "mostly because the machine or the container ran out of memory: take fewer num_workers, or a smaller "
     "prefetch_factor"),
    ("", "num_workers=0 reads in the rank itself and shows why"),
)  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """The exception, line and text to blame.

    Attributes:
        kind: The exception's type, or that of the one which it hands on.
        line: The script's own line to blame, if it is not in the exception's own traceback.
        elsewhere: It was not the rank's own code that failed, so its traceback says nothing.
    """

    kind: str
    text: str
    line: str = ""
    elsewhere: bool = False


def reason_of(error: BaseException) -> Reason:
    """Why this exception was raised.

    >>> reason_of(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")).text[:50]
    'DataLoader worker (pid 7) is killed by signal: Kil'
    """
    kind, text = type(error).__name__, str(error)
    handed_on = _HANDED_ON.match(text)
    if handed_on:
        return _handed_on(*handed_on.groups())
    if isinstance(error, RuntimeError) and _KILLED.match(text):
        advice = next(advice for word, advice in _ADVICE if word in text)
        return Reason(kind, f"{text.strip().rstrip('.')}: {advice}", _meanwhile(error), elsewhere=True)
    if isinstance(error, (MemoryError, RuntimeError, OSError)) and (
        isinstance(error, MemoryError) or _MEMORY.search(text)
    ):
        return Reason(kind, ". ".join(filter(None, (text.rstrip(". \n"), LESS_MEMORY))))
    return Reason(kind, text)


def _handed_on(kind: str, where: str, told: str) -> Reason:
    """The exception of another process, or thread, from the text of its traceback."""
    frames = list(_FRAME.finditer(told))
    rest = told[frames[-1].end() if frames else told.find("\n") :]
    lines = rest.splitlines()
    while lines and (not lines[0] or lines[0][0] == " "):
        del lines[0]
    text = re.sub(r"^[\w.]+(?:: |$)", "", " ".join(lines))
    own = [found for found in frames if is_own(found[1])]
    line = ""
    if own:
        file, number, name, code = own[-1].groups()
        line = one_line(traceback.FrameSummary(file, int(number), name, lookup_line=False, line=code or ""))
    return Reason(kind, f"{text} ({where})" if text else f"({where})", line)


def _meanwhile(error: BaseException) -> str:
    line = own_line(error, always=True)
    return f"the rank was {line}" if line else ""
