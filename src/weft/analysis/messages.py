"""Messages: sends matched with receives, and the waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from weft.timeline import Span, Timeline


class Message(NamedTuple):
    """One message between two ranks; seconds on the timeline's clock.

    Attributes:
        ready_s: When the sender handed it over.
        arrived_s: When the receiver had all of it.
    """

    sender: int
    receiver: int
    step: int
    microbatch: int
    what: str
    ready_s: float
    arrived_s: float


def match(timeline: Timeline) -> list[Message]:
    """The messages of which both ends were recorded, by arrival.

    Between two ranks messages of one step, microbatch and kind keep their order, so the first that was sent is the
    first that came.
    """
    sent: dict[tuple[int, int, int, int, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind == "send" and span.peer >= 0:
            sent[span.rank, span.peer, span.step, span.microbatch, content(span)].append(span)
    taken: dict[tuple[int, int, int, int, str], int] = defaultdict(int)
    found = []
    for span in timeline.spans:
        if span.kind != "recv" or span.peer < 0:
            continue
        key = (span.peer, span.rank, span.step, span.microbatch, content(span))
        number = taken[key]
        taken[key] += 1
        if number < len(sent[key]):
            found.append(Message(*key, sent[key][number].start_s, span.end_s))
    return sorted(found, key=lambda message: message.arrived_s)


def arrivals(messages: Iterable[Message]) -> dict[int, dict[int, list[Message]]]:
    """For each rank that received anything the messages of each sender, by arrival."""
    found: dict[int, dict[int, list[Message]]] = defaultdict(lambda: defaultdict(list))
    for message in messages:
        found[message.receiver][message.sender].append(message)
    return found


def content(span: Span) -> str:
    """The content of a message: the label of its span without the rank."""
    return _content(span.label, span.kind)


@cache  # there are few labels and many messages
def _content(label: str, kind: str) -> str:
    return label.rpartition(" to rank " if kind == "send" else " from rank ")[0]


def waits(timeline: Timeline) -> dict[tuple[int, int], float]:
    """For each pair of ranks how many seconds the first waited for the second."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind == "wait" and span.peer >= 0:
            found[span.rank, span.peer] += span.duration_s
    return dict(found)
