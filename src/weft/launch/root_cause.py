"""The rank that made a job fail, the text about it, and where the script's own code stands on those that wait. Pure."""

from __future__ import annotations

import linecache
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary

from weft.errors import is_own
from weft.terminal_text import visible
from weft.watch.failure import Failure, root_cause
from weft.watch.frames import one_line
from weft.watch.heartbeat import Sign, State
from weft.watch.judge import Verdict, leaving_text

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


@dataclass(frozen=True)
class End:
    """The end of a rank's process.

    Attributes:
        code: Its exit code, or minus the number of the signal that killed it.
        time: When the launcher saw it, in seconds on the monotonic clock.
        ordered: The launcher itself ended it.
        host: Where it ran.
    """

    rank: int
    pid: int
    code: int
    time: float
    ordered: bool = False
    host: str = ""


@dataclass(frozen=True)
class Blame:
    """The text about a failed job, and the code with which the launcher exits."""

    rank: int
    headline: str
    details: str
    code: int


def is_failure(end: End, sign: Sign) -> bool:
    """True if a process ended as it should not have: it failed, or left while it was still at work."""
    return not end.ordered and (end.code != 0 or sign.state is State.RUNNING)


def blame(ends: Sequence[End], failures: Sequence[Failure], signs: Mapping[int, Sign]) -> Blame | None:
    """The rank that failed first and not only because another one did; None if all ended well.

    A rank that reported a failure counts even while its process has not ended yet: those that only lost
    their connection to it may be gone before.
    """
    reported = {failure.rank: failure for failure in failures}
    ended = {end.rank: end for end in ends if is_failure(end, signs[end.rank])}
    if not ended:
        return None
    silent = [  # they could not report a failure
        Failure(rank, end.host, end.pid, "exit", "", where=signs[rank].where(), time=end.time)
        for rank, end in ended.items()
        if rank not in reported
    ]
    cause = root_cause([*reported.values(), *silent])
    assert cause is not None
    code = exit_code(ended[cause.rank].code) if cause.rank in ended else 1
    left = _left(cause, signs)
    if left is not None:
        return left
    if cause.rank in reported:
        return Blame(cause.rank, cause.headline(), cause.details(), code)
    end = ended[cause.rank]
    others = {
        rank: sign for rank, sign in signs.items() if sign.state is State.RUNNING and rank != cause.rank
    }
    return Blame(cause.rank, _headline(end, signs[cause.rank], others), "", code)


def exit_code(code: int) -> int:
    """With which code a launcher ends because a process ended with `code`; a signal's is negative."""
    return code if code > 0 else 128 - code if code < 0 else 1


def only_victims(ends: Sequence[End], failures: Sequence[Failure], signs: Mapping[int, Sign]) -> bool:
    """True if every failed rank only lost its connection to another one, of which nothing is known yet."""
    victims = {failure.rank for failure in failures if failure.victim}
    failed = {end.rank for end in ends if is_failure(end, signs[end.rank])}
    return bool(failed) and failed <= victims and all(failure.victim for failure in failures)


def blame_by(verdict: Verdict, ends: Sequence[End]) -> Blame:
    """The same for a job that was ended because of a verdict."""
    rank = verdict.ranks[0]
    code = next((end.code for end in ends if end.rank == rank and end.code > 0), 1)
    return Blame(rank, verdict.text, "", code)


def victims_text(failures: Sequence[Failure], culprit: int) -> str:
    """Who else failed, one line each, those that failed alike in one; empty if nobody did."""
    said = {failure.rank: (failure.kind, failure.text) for failure in failures}
    alike = [rank for rank in sorted(said) if rank != culprit and said[rank] == said.get(culprit)]
    others = [failure for failure in failures if failure.rank != culprit and failure.rank not in alike]
    lines = [f"rank {', '.join(map(str, alike))} failed with the same words"] if alike else []
    lines += [
        f"rank {failure.rank} then lost its connection" + (f" in {failure.where}" if failure.where else "")
        if failure.victim
        else f"also, {failure.headline()}"
        for failure in sorted(others, key=lambda failure: failure.time)
    ]
    return "\n".join(lines)


def _left(cause: Failure, signs: Mapping[int, Sign]) -> Blame | None:
    """The rank that a victim lost, if all that is known of it is that it came to its end: `sys.exit` in a step, say."""
    peer = -1 if cause.peer is None else cause.peer
    if not cause.victim or peer not in signs or signs[peer].state < State.FINISHING:
        return None
    text = leaving_text(peer, signs[peer], {cause.rank: signs[cause.rank]})
    return Blame(peer, text, standing({}, [cause]), 1)


def _headline(end: End, sign: Sign, others: Mapping[int, Sign]) -> str:
    where = f" in {sign.where()}" if sign.where() else ""
    who = f"rank {end.rank} on {end.host} (pid {end.pid})"
    if end.code == 0:
        if others:
            return leaving_text(end.rank, sign, others)
        return f"{who} ended{where} without coming to the end of its script"
    if end.code > 0:
        return f"{who} ended with exit code {end.code}{where}"
    hint = " (by hand, or because the machine ran out of memory)" if -end.code == signal.SIGKILL else ""
    return f"{who} was killed by {signal_name(-end.code)}{where}{hint}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
