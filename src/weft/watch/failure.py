"""The failure of a rank, in words that the others and the launcher can repeat.

A failure of one rank breaks the connections of all others. A rank that only lost its connection is a
victim: it is not blamed as long as somebody else can be.

Some exceptions say in a roundabout way why: a worker of a DataLoader hands its exception on as a text with its whole
traceback, of which the reason is the last line. If a worker is killed, the error is
raised in whatever line the rank happens to be.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from weft.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    FormatError,
    PeerError,
    PlacementError,
    ScheduleError,
    SplitError,
    UsageError,
    VerifyError,
    WeftError,
    is_own,
)
from weft.terminal_text import LINES, visible
from weft.untrusted import MOST_RANKS, read_text, whole
from weft.watch.frames import one_line, own_line, own_traceback
from weft.watch.heartbeat import Sign
from weft.watch.process import host_name

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


def _handed_on(kind: str, where: str, text: str) -> Reason:
    """The exception of another process, or thread, from the text of its traceback."""
    frames = list(_FRAME.finditer(text))
    rest = text[frames[-1].end() if frames else text.find("\n") :]
    lines = rest.splitlines()
    while lines and (not lines[0] or lines[0][0] == " "):
        del lines[0]
    message = re.sub(r"^[\w.]+(?:: |$)", "", " ".join(lines))
    own = [found for found in frames if is_own(found[1])]
    line = ""
    if own:
        file, number, name, code = own[-1].groups()
        line = one_line(traceback.FrameSummary(file, int(number), name, lookup_line=False, line=code or ""))
    return Reason(kind, f"{message} ({where})" if message else f"({where})", line)


def _meanwhile(error: BaseException) -> str:
    line = own_line(error, always=True)
    return f"the rank was {line}" if line else ""


_LOST = re.compile(
    r"Connection (closed by|reset by|refused)|Broken pipe|pair closure|connection was (closed|aborted)"
    r"|Socket closed|[Rr]emote process|recvValue failed|sendBytes failed|Timed out waiting",
)
_TRACEBACK_BYTES = 20_000
_MOST_LINES = 4
_SAID = (
    CheckpointError, ConfigError, DivergenceError, FormatError, PlacementError, ScheduleError, SplitError, UsageError,
    VerifyError,
)  # fmt: skip
"""Errors that say what is wrong with the script, its input or its files."""


@dataclass(frozen=True)
class Failure:
    """The failure of one rank.

    Attributes:
        kind: The exception's type, or a signal's name, or "exit".
        text: The exception's message.
        where: The step, microbatch, phase and module, in words.
        time: Seconds on the monotonic clock of its host.
        line: The script's own line to blame, if the traceback does not show it at once; and which of its lines assume
            more ranks, if a number was 0.
        victim: It only failed because another rank went away.
        peer: The rank that went away, if the victim knows.
    """

    rank: int
    host: str
    pid: int
    kind: str
    text: str
    traceback: str = ""
    where: str = ""
    time: float = 0.0
    victim: bool = False
    peer: int | None = None
    line: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, sign: Sign) -> Failure:
        """The failure of this process; `sign` is what it did at that time."""
        first = first_cause(error)
        lost = next((cause for cause in chain(first) if is_lost_peer(cause)), None)
        reason, says_all = reason_of(first), isinstance(error, _SAID)
        full = "" if reason.elsewhere else own_traceback(error, says_all)
        line = reason.line or own_line(first, always=says_all or lost is not None)
        if len(full) > _TRACEBACK_BYTES:
            full = f"...\n{full[-_TRACEBACK_BYTES:]}"
        return cls(
            rank=rank,
            host=host_name(),
            pid=os.getpid(),
            kind=reason.kind,
            text=visible(reason.text.replace("\n", " "))[:2000],
            traceback=visible(full, LINES),
            where=sign.where(),
            time=time.monotonic(),
            line=visible("\n".join(filter(None, (line, *_divided(first)))), LINES),
            victim=lost is not None,
            peer=lost.rank if isinstance(lost, PeerError) else sign.peer if lost is not None else None,
        )

    def headline(self) -> str:
        """Rank, host, pid, what and where in one line.

        >>> Failure(1, "node7", 42, "ValueError", "no", where="step 3, forward of layers.0").headline()
        'rank 1 on node7 (pid 42) failed in step 3, forward of layers.0: ValueError: no'
        """
        where = f" in {self.where}" if self.where else ""
        text = f": {self.text.splitlines()[0]}" if self.text else ""
        return f"rank {self.rank} on {self.host} (pid {self.pid}) failed{where}: {self.kind}{text}"

    def details(self) -> str:
        """The script's own line, if it is hard to find, and the traceback."""
        return "\n".join(part for part in (self.line, self.traceback.rstrip()) if part)

    def to_json(self, limit: int = 1 << 20) -> str:
        """JSON of at most `limit` bytes; the start of the traceback goes first."""
        values = asdict(self)
        while len(text := json.dumps(values)) > limit and values["traceback"]:
            values["traceback"] = values["traceback"][len(values["traceback"]) // 2 + 1 :]
        return text

    @classmethod
    def from_json(cls, text: str) -> Failure:
        values = json.loads(text)
        failure = cls(**{field.name: values[field.name] for field in fields(cls)})
        return failure


def _divided(error: BaseException) -> list[str]:
    """The script's lines that assume more ranks than there are, if the error is about a 0."""
    ranks, batch = whole(os.environ.get("WORLD_SIZE", ""), MOST_RANKS), "batch_size=0" in str(error)
    if not ranks or not (isinstance(error, ZeroDivisionError) or batch):
        return []
    from weft.check.script import LIMIT_BYTES  # no rank that is well needs the rules for scripts
    from weft.check.world import explained

    found = []
    for name in dict.fromkeys(
        frame.filename for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)
    ):
        with suppress(FormatError):
            text = read_text(Path(name), LIMIT_BYTES)
            found += [f"{name}, line {line}: {reason}" for line, reason in explained(text, ranks, batch)]
    return found[:_MOST_LINES]


def first_cause(error: BaseException) -> BaseException:
    """The exception to blame: what the script handled when weft refused something, or another rank was gone."""
    while (
        (isinstance(error, WeftError) or is_lost_peer(error))
        and not error.__suppress_context__
        and isinstance(error.__context__, Exception)
    ):
        error = error.__context__
    return error


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what caused it, the newest first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def is_lost_peer(error: BaseException) -> bool:
    """True if an exception says that another process went away.

    >>> is_lost_peer(RuntimeError("pair.cc:534] Connection closed by peer [127.0.0.1]:4711"))
    True
    """
    if isinstance(error, (PeerError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def root_cause(failures: Iterable[Failure]) -> Failure | None:
    """The earliest failure that is not only a consequence; else the earliest."""
    return min(failures, key=lambda failure: (failure.victim, failure.time), default=None)
