"""From recorded spans to the graph of `replay`: which piece of a rank's step needed which other one."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.analysis.messages import Message, match
from weft.analysis.parts import Period, pieces
from weft.analysis.replay import BEGIN, BETWEEN, END, JOIN, SAME_S, Need, Node, Replay
from weft.analysis.series import thinned
from weft.timeline import MESSAGES, WORK, Span, Timeline

MOST_SPANS = 60_000
"""The steps that are replayed have about so many spans; of more steps a sample is taken."""
LEAST_STEPS = 2


def replay_of(
    timeline: Timeline,
    periods: Mapping[int, Iterable[Period]],
    steps: Iterable[int],
    copies: Mapping[int, Sequence[int]],
) -> Replay:
    """The graph of a sample of these steps, of those that every rank recorded.

    Args:
        timeline: The recording.
        periods: For each rank its steps.
        steps: The numbers of those that are wanted.
        copies: For each rank the others that have the same partition and sum gradients with it.
    """
    found = {rank: {period.step: period for period in own} for rank, own in periods.items()}
    everywhere = sorted(step for step in set(steps) if all(step in own for own in found.values()))
    most = MOST_SPANS * len(timeline.steps) // max(1, len(timeline.spans))
    chosen = thinned(everywhere, max(LEAST_STEPS, most))
    wanted = frozenset(chosen)
    spans = [span for span in timeline.spans if span.step in wanted]
    return record(
        {rank: [own[step] for step in chosen] for rank, own in found.items()},
        spans,
        match(Timeline(spans)),
        copies,
    )


def record(
    periods: Mapping[int, Sequence[Period]],
    spans: Iterable[Span],
    messages: Iterable[Message],
    copies: Mapping[int, Sequence[int]],
) -> Replay:
    """The graph of recorded steps.

    Args:
        periods: For each rank the steps that are wanted, by time; the same steps on all ranks.
        spans: Those of these steps.
        messages: Those of these steps.
        copies: For each rank the others that have the same partition and sum gradients with it.
    """
    return _Builder(periods, spans, messages, copies).build()


class _Piece(NamedTuple):
    """A node with the wait before it: when that began and whom it was for; -1: nobody in particular, -2: no wait."""

    node: Node
    waited_s: float
    peer: int


NOBODY, NO_WAIT = -1, -2


def _order(piece: _Piece) -> tuple[float, float, int, int]:
    """The key by which pieces are sorted: of those at the same moment, first the ones that others could need."""
    node = piece.node
    return (
        node.start_s,
        node.end_s,
        node.step,
        0 if node.kind in (BEGIN, JOIN) else 2 if node.kind == END else 1,
    )


def _transfer_s(message: Message) -> float:
    """Not below 0, as clocks may differ."""
    return max(0.0, message.arrived_s - message.ready_s)


class _Builder:
    """Pieces of all ranks, by time, then what each needs."""

    def __init__(
        self,
        periods: Mapping[int, Sequence[Period]],
        spans: Iterable[Span],
        messages: Iterable[Message],
        copies: Mapping[int, Sequence[int]],
    ) -> None:
        self.periods, self.copies = periods, copies
        self.messages = list(messages)
        self.spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in spans:
            if span.kind in MESSAGES:
                continue  # they run beside the main thread
            self.spans[span.rank, span.step].append(span)
        cuts: dict[tuple[int, int], set[float]] = defaultdict(set)
        for message in self.messages:
            cuts[message.sender, message.step].add(message.ready_s)
        self.cuts = {where: sorted(moments) for where, moments in cuts.items()}
        found = [
            piece for rank in periods for period in periods[rank] for piece in self._pieces(rank, period)
        ]
        found = self._with_waits_in_sums(found)
        found.sort(key=_order)
        self.pieces = found
        self.of: dict[tuple[int, int], list[int]] = defaultdict(list)
        """The pieces of a rank and a step, in order."""
        for number, piece in enumerate(found):
            self.of[piece.node.rank, piece.node.step].append(number)
        self.place = {number: at for own in self.of.values() for at, number in enumerate(own)}
        self.ends = {where: [found[number].node.end_s for number in own] for where, own in self.of.items()}
        self.needs: list[list[Need]] = [[] for _ in found]

    def _pieces(self, rank: int, period: Period) -> list[_Piece]:
        """One period in order; waits in a row are one, and what sends a message ends when the message is ready."""
        step, cuts = period.step, self.cuts.get((rank, period.step), [])
        found = [_Piece(Node(rank, step, BEGIN, -1, -1, period.start_s, period.start_s), 0.0, NO_WAIT)]
        waited_s, peer = 0.0, NO_WAIT
        for start_s, end_s, span in pieces(period, self.spans[rank, step]):
            if span is not None and span.kind == "wait":
                waited_s = start_s if peer == NO_WAIT else waited_s
                peer = span.peer if span.peer != rank else NOBODY
                continue
            kind, stage, microbatch = (
                (BETWEEN, -1, -1) if span is None else (span.kind, span.stage, span.microbatch)
            )
            if span is not None and kind == "reduce" and start_s <= max(span.start_s, period.start_s):
                found.append(_Piece(Node(rank, step, JOIN, -1, -1, start_s, start_s), waited_s, peer))
                waited_s, peer = 0.0, NO_WAIT
            first, last = bisect_right(cuts, start_s + SAME_S), bisect_left(cuts, end_s - SAME_S)
            moments = [start_s, *cuts[first:last], end_s]
            for low, high in zip(moments, moments[1:], strict=False):
                found.append(_Piece(Node(rank, step, kind, stage, microbatch, low, high), waited_s, peer))
                waited_s, peer = 0.0, NO_WAIT
        found.append(_Piece(Node(rank, step, END, -1, -1, period.end_s, period.end_s), waited_s, peer))
        return found

    def build(self) -> Replay:
        """All needs, then what is left of each wait."""
        self._add_messages()
        self._add_sums()
        self._add_waits()
        nodes = [piece.node for piece in self.pieces]
        durations = [node.end_s - node.start_s for node in nodes]
        before = self._before()
        needs = tuple(
            tuple(need for need in own if need.node < number) for number, own in enumerate(self.needs)
        )
        begins = {rank: own[0].start_s for rank, own in self.periods.items() if own}
        lags = self._lags(before, needs, durations)
        steps = max(map(len, self.periods.values()), default=0)
        return Replay(tuple(nodes), before, needs, lags, tuple(durations), begins, steps)

    def _before(self) -> tuple[int, ...]:
        last: dict[int, int] = {}
        found = []
        for number, piece in enumerate(self.pieces):
            found.append(last.get(piece.node.rank, -1))
            last[piece.node.rank] = number
        return tuple(found)

    def _lags(
        self,
        before: Sequence[int],
        needs: Sequence[Sequence[Need]],
        durations: Sequence[float],
    ) -> tuple[float, ...]:
        """The seconds that each wait took beyond what it needed."""
        ends: list[float] = []
        lags = []
        for number, piece in enumerate(self.pieces):
            node = piece.node
            could_s = node.start_s if node.kind == BEGIN else ends[before[number]]
            for need in needs[number]:
                could_s = max(could_s, ends[need.node] + need.after_s + need.transfer_s)
            lag_s = max(0.0, node.start_s - could_s) if piece.peer != NO_WAIT and needs[number] else 0.0
            lags.append(lag_s)
            ends.append(could_s + lag_s + durations[number])
        return tuple(lags)

    def _anchor(self, rank: int, step: int, at_s: float) -> int | None:
        """The last piece of a rank that had ended then: what it did, or its begin."""
        own = self.of.get((rank, step))
        if not own:
            return None
        at = bisect_right(self.ends[rank, step], at_s + SAME_S) - 1
        while at > 0 and self.pieces[own[at]].node.kind in (JOIN, END):
            at -= 1
        return own[max(0, at)]

    def _add_messages(self) -> None:
        self.arrived: dict[tuple[int, int], list[float]] = defaultdict(list)
        work: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for number, piece in enumerate(self.pieces):
            if piece.node.kind in WORK:
                work[piece.node.rank, piece.node.step, piece.node.microbatch].append(number)
        found: list[tuple[int, int, Message]] = []
        for message in self.messages:
            source = self._anchor(message.sender, message.step, message.ready_s)
            target = self._user(message, work)
            self.arrived[message.receiver, message.step].append(message.arrived_s)
            if source is not None and target is not None:
                found.append((source, target, message))
        most_s = self._transfers(found)
        for source, target, message in found:
            after_s = max(0.0, message.ready_s - self.pieces[source].node.end_s)
            transfer_s = min(
                _transfer_s(message),
                most_s[message.sender, message.receiver, self._waits_for(target, message)],
            )
            self.needs[target].append(Need(source, after_s, transfer_s, True))
        for moments in self.arrived.values():
            moments.sort()

    def _waits_for(self, target: int, message: Message) -> bool:
        """True if a rank stood still when the message came."""
        piece = self.pieces[target]
        return piece.peer != NO_WAIT and message.arrived_s >= piece.waited_s

    def _transfers(self, found: Iterable[tuple[int, int, Message]]) -> dict[tuple[int, int, bool], float]:
        """The longest transfer of a message between two ranks, in seconds, by whether it was waited for.

        A rank that works reads its messages late: their times say nothing of the way. So they take no longer than the
        middle one of those that were waited for, or of all where none was.
        """
        took: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
        for _, target, message in found:
            waits = self._waits_for(target, message)
            took[message.sender, message.receiver, waits].append(_transfer_s(message))
        most: dict[tuple[int, int, bool], float] = {}
        for sender, receiver, waits in took:
            known = took.get((sender, receiver, True), took[sender, receiver, waits])
            most[sender, receiver, waits] = math.inf if waits else statistics.median(known)
        return most

    def _user(self, message: Message, work: Mapping[tuple[int, int, int], Sequence[int]]) -> int | None:
        """The piece that needs a message: the work that it is for, with what the host does right before it. None if
        there is none.
        """
        own = self.of.get((message.receiver, message.step), [])
        begins_s = message.arrived_s - SAME_S
        same = work.get((message.receiver, message.step, message.microbatch), ())
        at = bisect_left(same, begins_s, key=lambda number: self.pieces[number].node.start_s)
        if at == len(same):
            later = bisect_left(own, begins_s, key=lambda number: self.pieces[number].node.start_s)
            return own[later] if later < len(own) and self.pieces[own[later]].peer != NO_WAIT else None
        place = self.place[same[at]]
        while place > 0:
            node = self.pieces[own[place - 1]].node
            if node.kind in WORK or node.start_s < begins_s:
                break
            place -= 1
        return own[place]

    def _with_waits_in_sums(self, found: list[_Piece]) -> list[_Piece]:
        """A sum begins when the last copy has come to it; before that it is a wait.

        Copies that came to it after a rank had ended its own are no part of that rank's.
        """
        order: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, piece in enumerate(found):
            if piece.node.kind == JOIN:
                order[piece.node.rank, piece.node.step].append(number)
        self.joins: dict[Node, list[Node]] = {}
        result = list(found)
        for (own, step), numbers in order.items():
            lists = [order.get((rank, step), []) for rank in self.copies.get(own, ())]
            for at, number in enumerate(numbers):
                came_s, node = found[number].node.start_s, found[number + 1].node
                others = [found[each[at]].node for each in lists if at < len(each)]
                others = [other for other in others if other.start_s < node.end_s]
                if others:
                    last_s = max(came_s, *(other.start_s for other in others))
                    node = node._replace(start_s=last_s)
                    result[number + 1] = _Piece(node, came_s, NOBODY)
                    self.joins[node] = others
        return result

    def _add_sums(self) -> None:
        numbers = {piece.node: number for number, piece in enumerate(self.pieces) if piece.node.kind == JOIN}
        for number, piece in enumerate(self.pieces):
            for other in self.joins.get(piece.node, ()):
                self.needs[number].append(Need(numbers[other]))

    def _add_waits(self) -> None:
        for number, piece in enumerate(self.pieces):
            node = piece.node
            if piece.peer == NO_WAIT or self.needs[number]:
                continue
            moments = self.arrived.get((node.rank, node.step), ())
            at = bisect_left(moments, piece.waited_s)
            if at < len(moments) and moments[at] <= node.start_s + SAME_S:
                continue  # it waited for a message that something later needs
            own = self.of[node.rank, node.step]
            works = any(self.pieces[other].node.kind in WORK for other in own[self.place[number] :])
            ranks = (
                [piece.peer]
                if piece.peer != NOBODY and works
                else [r for r in self.periods if r != node.rank]
            )
            anchors = (self._anchor(rank, node.step, node.start_s) for rank in ranks)
            self.needs[number] += [Need(anchor) for anchor in anchors if anchor is not None]
