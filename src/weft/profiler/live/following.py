"""Follows a recording while it is written: each look reads what was added since the one before, and nothing twice.

    rank<N>.spans          what ran when (`weft.profiler.format`)
    rank<N>.steps.jsonl    a line a step (`weft.profiler.steps`); where there is none, steps come from spans
    rank<N>.facts.json     what a rank is (`weft.profiler.facts`)

Only the last steps are kept. A file that is replaced by a shorter or another one, as by a new job, is begun anew. Now
and then the rules are asked about what is there.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.analysis.analysis import Analysis
from weft.analysis.run import Facts, Run, Step
from weft.errors import FormatError
from weft.profiler.facts import read_facts
from weft.profiler.format import HEADER_BYTES, RECORD, Header
from weft.profiler.host import clocks
from weft.profiler.spans import span_of
from weft.profiler.steps import step_of
from weft.rules.rule import FOUND, Finding, Rule, judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict
from weft.timeline import LATEST_S, WORK, Span, Timeline
from weft.untrusted import MOST_RANKS, parse_json, regular
from weft.watch.process import host_name, is_alive

KEEP_STEPS = 64
"""So many of the last steps are kept."""
FIRST_BYTES = 4 << 20
"""Of a file that is there already no more than this is read, its end."""
PART_BYTES = 16 << 20
"""No look reads more of one file."""
FIRST_READ = 256
"""The first bytes of a file, which differ between jobs: a header, with the clock's reading when the file began."""
_LINE_BYTES = 1 << 20
_NAME = re.compile(r"rank(\d{1,7})\.(spans|steps\.jsonl|facts\.json)")


class Tail:
    """The end of a file that grows.

    Args:
        path: The file, which may come later.
        head: So many bytes at its begin are read in any case.
    """

    def __init__(self, path: Path, head: int = 0) -> None:
        self._path, self._head = path, head
        self._at = 0
        self._first = b""
        """How the file began: a new job's begins otherwise."""
        self.begun = 0
        """How often a file was begun."""

    def more(self, unit: int = 1) -> tuple[bytes, bytes]:
        """The head if a file begins, and what was added; of a file that is there already its end, in whole units."""
        try:
            with open(regular(self._path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                first = file.read(FIRST_READ)
                if len(first) < max(1, self._head):
                    return b"", b""
                head = b""
                if not self._first or not first.startswith(self._first) or size < self._at:
                    head = first[: self._head]
                    skipped = max(0, size - self._head - FIRST_BYTES) // unit * unit
                    self._first, self._at = first, self._head + skipped
                    self.begun += 1
                file.seek(self._at)
                added = file.read(PART_BYTES)
        except (OSError, ValueError):  # it is not there, or no file
            return b"", b""
        self._at += len(added)
        return head, added


@dataclass
class _Rank:
    """The files and latest spans of a rank."""

    spans_file: Tail
    steps_file: Tail
    header: Header | None = None
    left: bytes = b""
    """The begin of a record."""
    line: bytes = b""
    """The begin of a line; the first one of a file that was entered in its middle may be cut, and is dropped."""
    spans: deque[Span] = field(default_factory=deque)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    facts: Facts | None = None
    facts_at: tuple[int, int] = (0, 0)
    complete: bool = False


class Follower:
    """Looks at the folder of a recording again and again.

    Args:
        folder: It may come later.
        alive: Whether a process of this host still runs.
    """

    def __init__(self, folder: Path, alive: Callable[[int], bool] = is_alive) -> None:
        self._folder, self._alive = folder, alive
        self._ranks: dict[int, _Rank] = {}

    def look(self) -> Run:
        """The last steps of the run, as far as they are written; `complete` if nothing more will come."""
        with suppress(OSError):
            for name in os.listdir(self._folder):
                found = _NAME.fullmatch(name)
                if found and int(found[1]) < MOST_RANKS and int(found[1]) not in self._ranks:
                    path = self._folder / f"rank{int(found[1])}"
                    self._ranks[int(found[1])] = _Rank(
                        Tail(path.with_suffix(".spans"), HEADER_BYTES), Tail(path.with_suffix(".steps.jsonl"))
                    )
        for number, rank in self._ranks.items():
            self._read_facts(number, rank)
            self._read_spans(number, rank)
            self._read_steps(rank)
        return self._run()

    def _read_spans(self, number: int, rank: _Rank) -> None:
        head, added = rank.spans_file.more(RECORD.size)
        if head:
            rank.spans.clear()
            rank.left, rank.header = b"", None
            with suppress(FormatError):
                rank.header = Header.unpack(head, f"rank{number}.spans")
        if rank.header is None:
            return
        content = rank.left + added
        whole = len(content) // RECORD.size * RECORD.size
        rank.left = content[whole:]
        for record in RECORD.iter_unpack(content[:whole]):
            span = span_of(number, record)
            if span is not None:
                rank.spans.append(span)
        last = max((span.step for span in rank.spans), default=0)
        while rank.spans and rank.spans[0].step <= last - KEEP_STEPS:
            rank.spans.popleft()

    def _read_steps(self, rank: _Rank) -> None:
        begun = rank.steps_file.begun
        _, added = rank.steps_file.more()
        if rank.steps_file.begun != begun:
            rank.steps.clear()
            rank.line, rank.complete = b"", False
        *lines, rank.line = (rank.line + added).split(b"\n")
        rank.line = rank.line[: _LINE_BYTES + 1]
        for line in lines:
            with suppress(FormatError, UnicodeDecodeError):
                found = parse_json(line.decode("utf-8")) if len(line) <= _LINE_BYTES else None
                step = step_of(found)
                if step is not None:
                    rank.steps.append(step)
                rank.complete |= found == "end"

    def _read_facts(self, number: int, rank: _Rank) -> None:
        path = self._folder / f"rank{number}.facts.json"
        with suppress(OSError, ValueError, FormatError):
            seen = regular(path).stat()
            if (seen.st_ino, seen.st_mtime_ns) != rank.facts_at:
                rank.facts_at = seen.st_ino, seen.st_mtime_ns
                rank.facts, _ = read_facts(path)

    def _run(self) -> Run:
        walls = {rank.header.clock: rank.header.offset_s for rank in self._ranks.values() if rank.header}
        offsets = clocks.common(clocks.offsets(self._folder), walls) if walls else {}
        spans: list[Span] = []
        steps: dict[int, tuple[Step, ...]] = {}
        for number, rank in sorted(self._ranks.items()):
            own = offsets.get(rank.header.clock, clocks.Offset()) if rank.header else clocks.Offset()
            spans += own.moved(rank.spans)
            found = rank.steps or _steps(rank.spans)
            steps[number] = tuple(replace(step, start_s=own.at(step.start_s)) for step in found)
        facts = {number: rank.facts for number, rank in sorted(self._ranks.items()) if rank.facts is not None}
        error_s = clocks.error_s(offsets.values())
        return Run(self._folder.resolve().name, Timeline(spans), facts, steps, {}, error_s, self._complete())

    def _complete(self) -> bool:
        """Every rank said that it has come to its end, or all their processes, which ran on this host, are gone."""
        ranks = list(self._ranks.values())
        if not ranks or any(rank.facts is None for rank in ranks):
            return False
        known = [(rank, rank.facts) for rank in ranks if rank.facts is not None]
        return len(ranks) >= max(facts.ranks for _, facts in known) and all(
            rank.complete or (facts.pid > 0 and facts.host == host_name() and not self._alive(facts.pid))
            for rank, facts in known
        )


def _steps(spans: deque[Span]) -> list[Step]:
    """The steps, as far as spans alone show them."""
    found: dict[int, dict[str, float]] = {}
    for span in spans:
        kind = "work" if span.kind in WORK else span.kind
        own = found.setdefault(span.step, {})
        own[kind] = own.get(kind, 0.0) + span.duration_s
        if kind == "step" and abs(span.start_s) <= LATEST_S:
            own["begin"] = span.start_s
    return [
        Step(
            number, own["begin"], own["step"], own.get("data", 0.0), own.get("optimizer", 0.0),
            own.get("work", 0.0), own.get("wait", 0.0),
        )
        for number, own in sorted(found.items())
        if "begin" in own
    ]  # fmt: skip


JUDGE_S = 5.0


class Judged:
    """The latest findings of the rules.

    Args:
        rules: Those to ask; all that weft has if not given.
        every_s: Seconds after which they are asked again.
        clock: Seconds, from any start.
    """

    def __init__(
        self,
        rules: Sequence[Rule] | None = None,
        every_s: float = JUDGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules, self._every_s, self._clock = RULES if rules is None else rules, every_s, clock
        self._next = float("-inf")
        self._found: list[Finding] = []

    def of(self, run: Run) -> list[Finding]:
        """The findings on the last steps: causes in the order of the verdict, then their consequences."""
        if self._clock() >= self._next and run.timeline.spans:
            judged = verdict(judge(self._rules, Analysis(run)), self._rules).findings
            found = [each for each in judged if each.status in FOUND]
            self._found = sorted(found, key=lambda each: bool(each.explained_by))
            self._next = self._clock() + self._every_s
        return self._found
