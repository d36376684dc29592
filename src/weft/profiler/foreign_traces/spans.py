"""The events of one process in a trace of `torch.profiler`, as spans of a rank."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weft.timeline import Span
from weft.untrusted import MOST_RANKS, whole

GAP_S = 1e-4
"""Work with a shorter gap between is one span: what lies between is the dispatch of the next operator."""


class Event(NamedTuple):
    """Something that took time; seconds on the trace's clock."""

    name: str
    category: str
    start_s: float
    end_s: float
    process: int
    thread: int
    known: Mapping[str, Any]

    def later(self, seconds: float) -> Event:
        """The same, so many seconds later."""
        return self._replace(start_s=self.start_s + seconds, end_s=self.end_s + seconds)


class Work(NamedTuple):
    """The meaning of a range."""

    kind: str
    stage: int = -1
    microbatch: int = -1


class Piece(NamedTuple):
    """Some work, from when to when."""

    start_s: float
    end_s: float
    work: Work


_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_ACTION = re.compile(r"(?:PP:)?(\d{1,6})([FBIW])(\d{1,6})$")
_MICROBATCH = re.compile(r"(forward|backward)[ _](\d{1,6})$", re.IGNORECASE)
_NAMES = (
    (re.compile(r"Optimizer\.step"), "optimizer"),
    (re.compile(r"enumerate\(DataLoader\)|dataloader", re.IGNORECASE), "data"),
    (re.compile(r"forward$|fwd$", re.IGNORECASE), "F"),
    (re.compile(r"backward$|bwd$", re.IGNORECASE), "B"),
)
_BACKWARD = "autograd::engine::evaluate_function"
_MESSAGE = re.compile(r"(?:gloo|nccl|mpi|ucc):(\w+)")
_KERNEL = re.compile(r"nccl\w*?Kernel\w*?_(\w+?)(?:_|\(|$)")
_NOT_WORK = re.compile(r"c10d::|record_param_comms|(?:gloo|nccl|mpi|ucc):")
_BETWEEN = re.compile(r"Memcpy HtoD")


def spans_of(events: Sequence[Event], rank: int, ranks: int) -> list[Span]:
    """The spans of a rank from its events, which are in the order of their begin."""
    steps = [(event, found) for event in events if (found := _STEP.match(event.name))]
    steps = [each for each in steps if each[0].category != "gpu_user_annotation"]
    numbers, starts = [int(found[1]) for _, found in steps], [event.start_s for event, _ in steps]

    def step_at(seconds: float) -> int:
        return numbers[max(0, bisect_right(starts, seconds) - 1)] if numbers else -1

    main = _main_thread(events, [event for event, _ in steps])
    ranges = list(_ranges(events, main))
    kernels = [event for event in events if event.category in ("kernel", "gpu_memcpy")]
    work = (
        _of_kernels(kernels, events, ranges)
        if kernels
        else _merged([*ranges, *_operators(events, main, ranges)])
    )
    messages = list(_messages(kernels if kernels else events, bool(kernels)))
    spans = [Span(rank, "step", -1, event.start_s, event.end_s, step=int(found[1])) for event, found in steps]
    spans += [
        Span(rank, each.work.kind, each.work.microbatch, each.start_s, each.end_s, each.work.stage, "",
             step_at(each.start_s))
        for each in work
    ]  # fmt: skip
    for what, event in messages:
        spans += _communication(
            what, event, rank, _peer(what, event, rank, ranks), step_at(event.start_s), work
        )
    return spans


def _main_thread(events: Sequence[Event], steps: Sequence[Event]) -> int:
    """The thread of the steps; without steps the one that ran most operators, or most of anything."""
    operators = [event for event in events if event.category == "cpu_op"]
    counted = Counter(event.thread for event in steps or operators or events)
    return counted.most_common(1)[0][0] if counted else -1


def meaning(name: str) -> Work | None:
    """The meaning of a named range, if its name is known.

    >>> meaning("PP:1B3"), meaning("Forward 2"), meaning("Optimizer.step#SGD.step"), meaning("mine")
    (Work(kind='B', stage=1, microbatch=3), Work(kind='F', stage=-1, microbatch=2), Work(kind='optimizer', ...), None)
    """
    if found := _ACTION.match(name):
        return Work(found[2], int(found[1]), int(found[3]))
    if found := _MICROBATCH.match(name):
        return Work("F" if found[1].lower() == "forward" else "B", -1, int(found[2]))
    return next((Work(kind) for pattern, kind in _NAMES if pattern.match(name)), None)


def _ranges(events: Iterable[Event], main: int) -> Iterator[Piece]:
    """Ranges of the main thread with a meaning; one that lies in another one is part of that."""
    reached = float("-inf")
    for event in events:
        if event.category == "user_annotation" and event.thread == main and event.start_s >= reached:
            found = meaning(event.name)
            if found is not None:
                reached = event.end_s
                yield Piece(event.start_s, event.end_s, found)


def _operators(events: Iterable[Event], main: int, ranges: Sequence[Piece]) -> Iterator[Piece]:
    """Operators outside of ranges, but for those that communicate; one that another one calls is part of that."""
    reached = float("-inf")
    starts = [each.start_s for each in ranges]
    for event in events:
        backward = event.name.startswith(_BACKWARD)
        if event.category != "cpu_op" or not (event.thread == main or backward) or event.start_s < reached:
            continue
        at = bisect_right(starts, event.start_s) - 1
        if at >= 0 and event.start_s < ranges[at].end_s:
            continue
        reached = event.end_s
        if not _NOT_WORK.match(event.name):
            end_s = min(event.end_s, starts[at + 1]) if at + 1 < len(starts) else event.end_s
            yield Piece(event.start_s, end_s, Work("B" if backward else "F"))


def _of_kernels(kernels: Iterable[Event], events: Iterable[Event], ranges: Sequence[Piece]) -> list[Piece]:
    """Kernels that work, each with the meaning of the range, or of autograd's function, that started it."""
    backward = [
        Piece(event.start_s, event.end_s, Work("B")) for event in events if event.name.startswith(_BACKWARD)
    ]
    started = {}
    for event in events:
        if event.category in ("cuda_runtime", "cuda_driver") and isinstance(
            event.known.get("correlation"), int
        ):
            started[event.known["correlation"]] = event.start_s
    known = [sorted(group) for group in (ranges, backward)]
    found = []
    for kernel in kernels:
        if _KERNEL.match(kernel.name):
            continue
        at_s = started.get(kernel.known.get("correlation"), float("nan"))
        work = next((each.work for group in known for each in _around(group, at_s)), Work("F"))
        if _BETWEEN.match(kernel.name):
            work = Work("copy")
        found.append(Piece(kernel.start_s, kernel.end_s, work))
    return _merged(found)


def _around(pieces: Sequence[Piece], at_s: float) -> list[Piece]:
    """The last piece that began before a moment, if it lasts beyond it."""
    at = bisect_right(pieces, at_s, key=lambda piece: piece.start_s) - 1
    return [pieces[at]] if at >= 0 and at_s <= pieces[at].end_s else []


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """By their begin, none of them over another one; equal work with hardly a gap is one piece."""
    found: list[Piece] = []
    for piece in sorted(pieces):
        start_s = max(piece.start_s, found[-1].end_s) if found else piece.start_s
        if start_s >= piece.end_s:
            continue
        if found and found[-1].work == piece.work and start_s - found[-1].end_s <= GAP_S:
            found[-1] = found[-1]._replace(end_s=piece.end_s)
        else:
            found.append(Piece(start_s, piece.end_s, piece.work))
    return found


def _messages(events: Iterable[Event], kernels: bool) -> Iterator[tuple[str, Event]]:
    """Messages and sums, with what they are: send, recv, barrier, all_reduce, ..."""
    for event in events:
        if kernels:
            found = _KERNEL.match(event.name)
        else:
            found = _MESSAGE.match(event.name) if event.category == "user_annotation" else None
        if found is not None:
            yield found[1].lower(), event


def _peer(what: str, event: Event, rank: int, ranks: int) -> int:
    """The rank at the other end, or -1."""
    named = event.known.get("Dst Rank" if what == "send" else "Src Rank")
    number = whole(str(named), MOST_RANKS - 1)
    if number is not None and number != rank and number < ranks:
        return number
    return 1 - rank if ranks == 2 else -1


def _communication(
    what: str, event: Event, rank: int, peer: int, step: int, work: Sequence[Piece]
) -> Iterator[Span]:
    """A message and the waiting for it, or the part of a sum that no work hides."""
    message = what in ("send", "recv")
    if message:
        label = f"message {'to' if what == 'send' else 'from'} rank {peer}" if peer >= 0 else "message"
        yield Span(rank, what, -1, event.start_s, event.end_s, -1, label, step, peer)
    waits = message or what == "barrier"
    if not message:
        peer = -1
    label = f"for rank {peer}" if waits and peer >= 0 else "" if message else what.replace("_", " ")
    for start_s, end_s in _without(event.start_s, event.end_s, work):
        yield Span(rank, "wait" if waits else "reduce", -1, start_s, end_s, -1, label, step, peer)


def _without(start_s: float, end_s: float, work: Sequence[Piece]) -> Iterator[tuple[float, float]]:
    """The parts of a time in which no work runs."""
    at = max(0, bisect_right(work, start_s, key=lambda piece: piece.start_s) - 1)
    for piece in work[at:]:
        if piece.start_s >= end_s:
            break
        if piece.start_s > start_s:
            yield start_s, piece.start_s
        start_s = max(start_s, piece.end_s)
    if start_s < end_s:
        yield start_s, end_s
