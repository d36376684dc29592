"""Spans of all ranks: recorded and simulated timelines are of one type."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import groupby

from weft.document import Document
from weft.errors import FormatError, UsageError
from weft.untrusted import MOST_RANKS

VERSION = 1
WORK = ("F", "B", "I", "W")
MESSAGES = ("send", "recv")
BESIDE = ("data", "copy", "checkpoint", "collector", "prepare")
"""What a rank does besides: waits for the next batch, copies it to its device, saves, stands still for Python's garbage
collector, prepares the first steps (traces and splits the model, compares, puts memory in order)."""
KINDS = (*WORK, *MESSAGES, "wait", "reduce", "optimizer", "step", *BESIDE, "tensor")
"""In the order of their codes in files: new ones come last."""

LATEST_S = 1e15
"""No time is further from 0, so that differences of them are exact enough to draw."""


@dataclass(frozen=True)
class Span:
    """One thing that a rank did, from `start_s` to `end_s` on a clock that all ranks share.

    `kind` is F, B, I or W (work on a microbatch), send, recv, wait, reduce (the all-reduce of gradients),
    optimizer, step (the whole step), tensor (ranks that hold parts of one tensor exchange it, within work), or one of
    `BESIDE`. What lies between two steps has the number of the first; what
    lies before all steps has none.
    `peer` is the rank at the other end of a send, a receive or a wait.
    `microbatch`, `stage`, `step` and `peer` are -1 where they mean nothing or are not known.
    """

    rank: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float
    stage: int = -1
    label: str = ""
    step: int = -1
    peer: int = -1

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Spans of all ranks, in the order of rank and start.

    >>> timeline = Timeline([Span(0, "F", 0, 0.0, 1.0), Span(1, "F", 0, 1.0, 2.0)])
    >>> timeline.duration_s, timeline.idle_share(0), timeline.bubble
    (2.0, 0.5, 0.5)
    """

    spans: tuple[Span, ...]

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        ordered = tuple(sorted(spans, key=lambda span: (span.rank, span.start_s, span.end_s)))
        for span in ordered:
            if span.kind not in KINDS:
                raise FormatError(f'a span has the kind "{span.kind}", known are {", ".join(KINDS)}')
            if not span.end_s >= span.start_s:
                raise FormatError(f"a span ends before it starts: {span}")
            if not -LATEST_S <= span.start_s <= span.end_s <= LATEST_S:
                raise FormatError(f"a span lies more than {LATEST_S:g} s away: {span}")
        object.__setattr__(self, "spans", ordered)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        return {rank: tuple(spans) for rank, spans in groupby(self.spans, key=lambda span: span.rank)}

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did anything, ascending."""
        return tuple(self._by_rank)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps, ascending; none where spans do not say."""
        return tuple(sorted({span.step for span in self.spans if span.step >= 0}))

    @cached_property
    def start_s(self) -> float:
        """When the first span began; 0 if there is none."""
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """When the last span ended; 0 if there is none."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def duration_s(self) -> float:
        """From the start of the first span to the end of the last one, over all ranks."""
        return self.end_s - self.start_s

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, by start."""
        if rank not in self.ranks:
            raise UsageError(f"rank {rank} did nothing in this timeline, which has the ranks {self.ranks}")
        return self._by_rank[rank]

    def of_step(self, step: int) -> Timeline:
        """The spans of one step; :class:`UsageError` if there is none of that number."""
        if step not in self.steps:
            found = _listed(self.steps)
            raise UsageError(f"step {step} is not in this timeline, which has {found}")
        return Timeline(span for span in self.spans if span.step == step)

    def busy_s(self, rank: int) -> float:
        """The seconds that the rank worked (F, B, I, W); overlapping spans count once."""
        busy, reached = 0.0, float("-inf")
        for span in self.of_rank(rank):
            if span.kind in WORK and span.end_s > reached:
                busy += span.end_s - max(span.start_s, reached)
                reached = span.end_s
        return busy

    def idle_share(self, rank: int) -> float:
        """The share of the timeline's duration in which the rank ran no F, B, I or W."""
        busy = self.busy_s(rank)
        return max(0.0, 1.0 - busy / self.duration_s) if self.duration_s else 0.0

    @property
    def bubble(self) -> float:
        """The share of all ranks' time without work: the mean of `idle_share`."""
        if not self.ranks:
            return 0.0
        return sum(map(self.idle_share, self.ranks)) / len(self.ranks)

    def merged(self, other: Timeline) -> Timeline:
        """The spans of both."""
        return Timeline(self.spans + other.spans)

    def shifted(self, seconds: float) -> Timeline:
        """The same, `seconds` later."""
        return Timeline(
            replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in self.spans
        )

    def to_json(self) -> str:
        """The timeline as text that `from_json` reads."""
        return json.dumps({"weft": "timeline", "version": VERSION, "spans": [astuple(s) for s in self.spans]})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what `to_json` wrote; a fault is named by its path."""
        document = Document.parse(text, kind="timeline", version=VERSION)
        return cls([_read_span(record) for record in document["spans"]])


def _read_span(record: Document) -> Span:
    fields = record.items()
    if len(fields) not in (7, 8, 9):
        record.refuse("rank, kind, microbatch, start_s, end_s, stage, label, step and peer")
    rank, kind, microbatch, start_s, end_s, stage, label = fields[:7]
    if not 0 <= rank.whole() < MOST_RANKS:
        rank.refuse(f"a rank from 0 to {MOST_RANKS - 1}")
    if kind.text() not in KINDS:
        kind.refuse(f"one of {', '.join(KINDS)}")
    return Span(
        rank.whole(),
        kind.text(),
        microbatch.whole(),
        start_s.number(),
        end_s.number(),
        stage.whole(),
        label.text(),
        *(field.whole() for field in fields[7:]),
    )


def _listed(steps: tuple[int, ...]) -> str:
    if not steps:
        return "no steps"
    if len(steps) > 1 and steps[-1] - steps[0] == len(steps) - 1:
        return f"the steps {steps[0]} to {steps[-1]}"
    return f"the steps {', '.join(map(str, steps))}" if len(steps) > 1 else f"step {steps[0]}"
