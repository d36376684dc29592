"""Recorded steps as a graph that can be run again with other durations.

A node is a piece of a rank's main thread in which it did not wait: work on a microbatch, the optimizer, Python. An
edge says what had to come before:

1. the piece before it on the same rank;
2. for each message the piece of the sender that ended when the message was ready. What it took from there is the
   edge's transfer. The message is needed by the first work on its microbatch that began after it had come;
3. for a sum of gradients that every copy of the same partition has come to it;
4. for a wait without a message the last piece of the rank that was waited for, or of all ranks, if it waited for the
   step's end or between two steps.

What a wait took beyond all of that stays as it was: the node's lag. So a replay without a change is the recording, if
the clocks agree. Order is kept: a rank does what it did, in the order in which it did it, and a node begins when all
that it needs has ended, so that no shorter duration makes a step longer.

The steps are run in a circle, begun anew with the ranks as far apart as they ended; what is measured is the last round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from weft.timeline import KINDS, Span, Timeline

BEGIN, JOIN, END, BETWEEN, INSIDE = "begin", "join", "end", "between", "step"
"""Kinds of nodes besides those of spans: the ends of a period, and the moment in which a rank comes to a sum of
gradients, which take no time; what no span covers, outside and inside of steps."""
HOST = (BETWEEN, INSIDE)
SAME_S = 1e-9
"""Moments that are closer are one."""
FAITHFUL = 0.05
"""Gains are given only where a replay without a change differs from the recording by no more than this share."""
SETTLED = 3
"""So many steps run before the round that is measured."""


class Node(NamedTuple):
    """A piece of a rank's main thread, as it was recorded."""

    rank: int
    step: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class Need(NamedTuple):
    """A dependency of a node: another node (its number), a delay after its end, and the transfer of a message."""

    node: int
    after_s: float = 0.0
    transfer_s: float = 0.0
    message: bool = False


@dataclass(frozen=True)
class Replay:
    """Steps that can be run again.

    Attributes:
        nodes: In an order in which each comes after all that it needs.
        before: For each node the one before it on its rank; -1 for the first one.
        needs: What else it needs.
        lags_s: How much later it began than it could have.
        durations_s: What each takes; a change is other durations.
        begins_s: When each rank began its first step.
        steps: How many steps there are.
        transfers: What transfers take, in multiples of what they took.
    """

    nodes: tuple[Node, ...] = field(repr=False)
    before: tuple[int, ...] = field(repr=False)
    needs: tuple[tuple[Need, ...], ...] = field(repr=False)
    lags_s: tuple[float, ...] = field(repr=False)
    durations_s: tuple[float, ...] = field(repr=False)
    begins_s: Mapping[int, float]
    steps: int
    transfers: float = 1.0

    def scaled(self, factor: Callable[[Node], float]) -> Replay:
        """With each duration times the factor of its node."""
        pairs = zip(self.nodes, self.durations_s, strict=True)
        return replace(self, durations_s=tuple(took_s * factor(node) for node, took_s in pairs))

    def without(self, kinds: Container[str]) -> Replay:
        """With nothing to do for nodes of these kinds; who sums gradients still waits for the other copies."""
        return self.scaled(lambda node: 0.0 if node.kind in kinds else 1.0)

    def without_transfers(self) -> Replay:
        """With messages that are there when they are sent."""
        return replace(self, transfers=0.0)

    @cached_property
    def step_s(self) -> float:
        """The mean time from one step to the next, over ranks, once they have settled; 0 if there is none."""
        if not self.nodes:
            return 0.0
        begins, (ends, _) = self._settled
        return sum(ends[rank] - begins[rank] for rank in ends) / len(ends) / self.steps

    @cached_property
    def measured_s(self) -> float:
        """The same as it was recorded."""
        took: dict[int, float] = defaultdict(float)
        for node in self.nodes:
            if node.kind in (BEGIN, END):
                took[node.rank] += node.end_s if node.kind == END else -node.start_s
        return sum(took.values()) / len(took) / self.steps if took else 0.0

    @property
    def fidelity(self) -> float:
        """By which share of a step the replay without a change differs from the recording; nan if there is none."""
        return abs(self.step_s - self.measured_s) / self.measured_s if self.measured_s else math.nan

    @property
    def faithful(self) -> bool:
        """True if the replay is close enough to the recording for gains to be reported."""
        return self.fidelity <= FAITHFUL

    @cached_property
    def timeline(self) -> Timeline:
        """The first step as it is replayed, from 0: what a page draws as the ideal; waits are gaps."""
        if not self.nodes:
            return Timeline()
        _, (_, times) = self._settled
        first = self.nodes[0].step
        chosen = [
            (node, *at)
            for node, at in zip(self.nodes, times, strict=True)
            if node.step == first and node.kind in KINDS
        ]
        begin_s = min((start_s for _, start_s, _ in chosen), default=0.0)
        return Timeline(
            Span(
                node.rank,
                node.kind,
                node.microbatch,
                start_s - begin_s,
                end_s - begin_s,
                node.stage,
                "",
                node.step,
            )
            for node, start_s, end_s in chosen
            if node.kind != INSIDE
        )

    @cached_property
    def _settled(self) -> tuple[Mapping[int, float], tuple[dict[int, float], list[tuple[float, float]]]]:
        """When each rank begins the last round, and that round."""
        begins: Mapping[int, float] = self.begins_s
        for _ in range(math.ceil(SETTLED / self.steps)):
            begins, _ = self.run(begins)
        return begins, self.run(begins)

    def run(self, begins_s: Mapping[int, float]) -> tuple[dict[int, float], list[tuple[float, float]]]:
        """Once through the steps: when each rank ends, and each node's start and end; seconds."""
        ends: list[float] = []
        times: list[tuple[float, float]] = []
        last: dict[int, float] = {}
        transfers = self.transfers
        for node, before, needs, lag_s, took_s in zip(
            self.nodes, self.before, self.needs, self.lags_s, self.durations_s, strict=True
        ):
            start_s = ends[before] if before >= 0 else begins_s[node.rank]
            for number, after_s, transfer_s, _ in needs:
                there_s = ends[number] + after_s + transfers * transfer_s
                if there_s > start_s:
                    start_s = there_s
            start_s += lag_s
            end_s = start_s + took_s
            ends.append(end_s)
            times.append((start_s, end_s))
            last[node.rank] = end_s
        return last, times
