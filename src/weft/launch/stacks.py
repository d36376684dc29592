"""Where the script's own code stands on ranks that wait, read from the stacks that they answer with."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from traceback import FrameSummary

from weft.errors import is_own
from weft.terminal_text import visible
from weft.watch.failure import Failure
from weft.watch.frames import one_line

_BEGINS = re.compile(rb"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def split_stacks(output: bytes) -> tuple[bytes, bytes]:
    """The output of a rank itself, and its stacks after that."""
    found = _BEGINS.search(output)
    at = found.start() if found else len(output)
    return output[:at], output[at:]


def standing(stacks: Mapping[int, str], failures: Sequence[Failure]) -> str:
    r"""The script's own line of each rank that waited, one line for all ranks that stood in the same one: from its
    stacks, or from what it said as it lost its connection.

    >>> text = 'Current thread 0x7f (most recent call first):\n  File "/home/me/train.py", line 3 in <module>'
    >>> standing({0: text, 1: text}, [])
    'rank 0, 1 stood at /home/me/train.py, line 3, in <module>'
    """
    found = {failure.rank: failure.line for failure in failures if failure.victim}
    lines: dict[str, list[int]] = {}
    for rank, line in sorted((found | {rank: _own_line(text) for rank, text in stacks.items()}).items()):
        if line:
            lines.setdefault(line, []).append(rank)
    return "\n".join(f"rank {', '.join(map(str, ranks))} stood {line}" for line, ranks in lines.items())


def _own_line(stacks: str) -> str:
    """That of the thread which took the signal: the main one."""
    _, _, current = stacks.rpartition("Current thread 0x")
    for file, number, name in _FRAME.findall(current):
        if is_own(file):
            code = linecache.getline(file, int(number)).strip()
            return visible(one_line(FrameSummary(file, int(number), name, lookup_line=False, line=code)))
    return ""
