"""Where a rank's time went: every moment of a step belongs to exactly one part.

A step's period goes from its begin to that of the next step, so periods follow each other without a gap. Within
it the span that began last counts, as spans of the main thread lie within each other; sends and receives run
beside and do not count. A wait is split: from the moment in which the sender had the message ready it is a
transfer, before that it is a bubble. What no span covers is the host's own: Python, the script, logging.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.analysis.messages import Message, arrivals, match
from weft.timeline import MESSAGES, WORK, Span, Timeline

Arrived = Mapping[int, Sequence[Message]]
"""By sender its messages, by arrival."""


class Period(NamedTuple):
    """One step of one rank, with what lies between it and the next one; seconds on the timeline's clock."""

    step: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.start_s


class Parts(NamedTuple):
    """Seconds of one period; they add up to it.

    Attributes:
        transfer: Waiting for a message that was on its way.
        reduce: Waiting for the all-reduce of gradients.
        tensor: Within work, waiting for collectives over sharded tensors: the exposed time of tensor
            parallelism.
        warmup: Nothing to run, before the first backward pass of the step began.
        steady: The same, after that, before the last forward pass began.
        drain: The same, after both.
        host: What is none of the others: Python, the script between two steps.
    """

    forward: float = 0.0
    backward: float = 0.0
    backward_inputs: float = 0.0
    backward_weights: float = 0.0
    optimizer: float = 0.0
    transfer: float = 0.0
    reduce: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    copy: float = 0.0
    checkpoint: float = 0.0
    collector: float = 0.0
    prepare: float = 0.0
    warmup: float = 0.0
    steady: float = 0.0
    drain: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The period."""
        return sum(self)

    @property
    def work(self) -> float:
        """F, B, I and W."""
        return self.forward + self.backward + self.backward_inputs + self.backward_weights

    @property
    def bubble(self) -> float:
        """The rank could run nothing, and nothing was on its way to it."""
        return self.warmup + self.steady + self.drain


PART_OF = {
    "F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights", "optimizer": "optimizer",
    "reduce": "reduce", "tensor": "tensor", "data": "data", "copy": "copy", "checkpoint": "checkpoint",
    "collector": "collector", "prepare": "prepare", "step": "host",
}  # fmt: skip
"""The part that a kind of span is; a wait is split."""


def periods(timeline: Timeline, rank: int) -> list[Period]:
    """The steps of a rank, by time. A timeline without steps, as simulated ones are, is one period.

    Where the next step was not recorded, a period ends with the last span of its step.
    """
    spans = timeline.of_rank(rank)
    steps = [span for span in spans if span.kind == "step"]
    if not steps:
        return [Period(-1, timeline.start_s, timeline.end_s)]
    last_s: dict[int, float] = {}
    for span in spans:
        if span.kind not in MESSAGES:
            last_s[span.step] = max(span.end_s, last_s.get(span.step, span.end_s))
    end_s = max(span.end_s for span in spans if span.kind not in MESSAGES)
    ends = [
        after.start_s if after.step == span.step + 1 else min(after.start_s, last_s[span.step])
        for span, after in zip(steps, steps[1:], strict=False)
    ]
    ends.append(end_s)
    return [Period(span.step, span.start_s, end) for span, end in zip(steps, ends, strict=True)]


def parts(timeline: Timeline, rank: int, arrived: Arrived | None = None) -> dict[Period, Parts]:
    """For each period of a rank what its time went into; ``arrived`` is what came from each sender, if known."""
    if arrived is None:
        arrived = arrivals(match(timeline)).get(rank, {})
    found = periods(timeline, rank)
    starts = [period.start_s for period in found]
    has_steps = found[0].step >= 0
    own: list[list[Span]] = [[] for _ in found]
    for span in timeline.of_rank(rank):
        if span.kind in MESSAGES:
            continue
        first = max(0, bisect_right(starts, span.start_s) - 1)
        for number in range(first, len(found)):
            if number > first and starts[number] >= span.end_s:
                break
            own[number].append(span)
    return {
        period: _sweep(period, spans, arrived, has_steps) for period, spans in zip(found, own, strict=True)
    }


def _sweep(period: Period, spans: list[Span], arrived: Arrived, has_steps: bool) -> Parts:
    """The parts of one period."""
    first_backward = min((span.start_s for span in spans if span.kind in WORK[1:]), default=period.end_s)
    last_forward = max((span.start_s for span in spans if span.kind == "F"), default=period.start_s)
    seconds: dict[str, float] = defaultdict(float)
    for start_s, end_s, span in pieces(period, spans):
        if span is not None and span.kind != "wait":
            seconds[PART_OF[span.kind]] += end_s - start_s
            continue
        if span is None and has_steps:
            seconds["host"] += end_s - start_s
            continue
        ready_s = max(start_s, min(end_s, _ready_s(span, arrived))) if span is not None else end_s
        seconds["transfer"] += end_s - ready_s
        for name, low, high in (
            ("warmup", start_s, min(ready_s, first_backward)),
            ("steady", max(start_s, first_backward), min(ready_s, last_forward)),
            ("drain", max(start_s, first_backward, last_forward), ready_s),
        ):
            seconds[name] += max(0.0, high - low)
    return Parts(**seconds)


def pieces(period: Period, spans: Iterable[Span]) -> list[tuple[float, float, Span | None]]:
    """The period in pieces, each with the span that began last of those that cover it."""
    events: list[tuple[float, int, Span]] = []
    for span in spans:
        start_s, end_s = max(span.start_s, period.start_s), min(span.end_s, period.end_s)
        if start_s < end_s:
            events += [(start_s, 1, span), (end_s, 0, span)]
    events.sort(key=lambda event: (event[0], event[1], -event[2].end_s))
    found: list[tuple[float, float, Span | None]] = []
    open_: list[Span] = []
    now = period.start_s
    for at_s, begins, span in events:
        if at_s > now:
            found.append((now, at_s, open_[-1] if open_ else None))
            now = at_s
        if begins:
            open_.append(span)
        else:
            open_.remove(span)
    if now < period.end_s:
        found.append((now, period.end_s, None))
    return found


def inside(timeline: Timeline, rank: int, steps: Container[int]) -> dict[int, dict[str, float]]:
    """For these steps of a rank, from the begin to the end of the step's function, the seconds of each kind of span.

    The kind "step" is what no other span covers: Python.
    """
    own: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.of_rank(rank):
        if span.kind not in MESSAGES and span.step in steps:
            own[span.step].append(span)
    found: dict[int, dict[str, float]] = {}
    for step, spans in own.items():
        for whole in (span for span in spans if span.kind == "step"):
            seconds = found.setdefault(step, defaultdict(float))
            for start_s, end_s, top in pieces(Period(step, whole.start_s, whole.end_s), spans):
                seconds[top.kind if top is not None else "step"] += end_s - start_s
    return found


def _ready_s(wait: Span, arrived: Arrived) -> float:
    """When the sender had the message ready that ended a wait; its end if that is not known."""
    messages = arrived.get(wait.peer, ())
    at = bisect_right(messages, wait.end_s, key=lambda message: message.arrived_s) - 1
    if at < 0 or messages[at].arrived_s < wait.start_s:
        return wait.end_s
    return messages[at].ready_s
