"""The result of a simulation: the step time, who was idle when, the peak memory, and the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.schedule.schedule import Action
from weft.timeline import Span, Timeline


class Idle(NamedTuple):
    """The shares of the step in which a rank runs no F, B, I or W.

    Attributes:
        warmup: Without anything to do, before its first backward pass begins.
        steady: The same, after that, before its last forward pass begins.
        drain: The same, after both, up to the end of the step.
        transfer: Busy with sending and receiving.
        finish: Busy with the all-reduce of gradients and the optimizer.
    """

    warmup: float = 0.0
    steady: float = 0.0
    drain: float = 0.0
    transfer: float = 0.0
    finish: float = 0.0

    @property
    def bubble(self) -> float:
        """The share in which the rank has nothing to do."""
        return self.warmup + self.steady + self.drain

    @property
    def total(self) -> float:
        """All of it: `Timeline.idle_share`."""
        return sum(self)


Move = tuple[int, str, int, float, float, str]
"""(rank, send or recv, node, start, end, link): see `weft.simulate.wiring` for nodes."""


@dataclass(frozen=True)
class Simulation:
    """A simulated step; it begins at 0.

    Attributes:
        actions: For each rank what it ran, in order.
        start_s: For each rank when each action began.
        end_s: For each rank when each action ended.
        step_s: When the last rank had finished, in seconds.
        idle: For each rank the shares of the step in which it did not compute.
        peak_bytes: For each rank its peak memory.
        stages: How many stages there are.
        moves: Sends that take time, and receives that keep a rank busy, in the order of simulation.
        finish_s: For each rank when the all-reduce began, when the optimizer began and when it ended.
    """

    actions: tuple[tuple[Action, ...], ...] = field(repr=False)
    start_s: tuple[tuple[float, ...], ...] = field(repr=False)
    end_s: tuple[tuple[float, ...], ...] = field(repr=False)
    step_s: float
    idle: tuple[Idle, ...]
    peak_bytes: tuple[int, ...]
    stages: int
    moves: tuple[Move, ...] = field(repr=False)
    finish_s: tuple[tuple[float, float, float], ...] = field(repr=False)

    @property
    def bubble(self) -> float:
        """The mean over the ranks of the share of the step in which they have nothing to do."""
        return sum(idle.bubble for idle in self.idle) / len(self.idle)

    @property
    def bubble_rate(self) -> float:
        """(cost - work) / cost, as in "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 5.

        The cost is the time from the begin of the first to the end of the last action of the rank for which
        it is the longest; the work is the time of F, B, I and W of the rank that has most of them, which is
        m (F + B + W) where all stages are alike. The all-reduce and the optimizer do not count.
        """
        cost = max((ends[-1] - starts[0] for starts, ends in self._times if starts), default=0.0)
        work = max((sum(ends) - sum(starts) for starts, ends in self._times), default=0.0)
        return (cost - work) / cost if cost else 0.0

    @property
    def _times(self) -> Iterator[tuple[tuple[float, ...], tuple[float, ...]]]:
        return zip(self.start_s, self.end_s, strict=True)

    @cached_property
    def timeline(self) -> Timeline:
        """The step as spans; made when it is first asked for."""
        return Timeline([*self._work(), *self._moves(), *self._finish()])

    def _work(self) -> Iterator[Span]:
        for rank, (actions, (starts, ends)) in enumerate(zip(self.actions, self._times, strict=True)):
            for (stage, kind, microbatch), start, end in zip(actions, starts, ends, strict=True):
                yield Span(rank, kind, microbatch, start, end, stage)

    def _moves(self) -> Iterator[Span]:
        for rank, kind, node, start, end, link in self.moves:
            yield Span(rank, kind, node // (3 * self.stages), start, end, node % self.stages, link)

    def _finish(self) -> Iterator[Span]:
        for rank, (reduce, optimizer, end) in enumerate(self.finish_s):
            if optimizer > reduce:
                yield Span(rank, "reduce", -1, reduce, optimizer)
            if end > optimizer:
                yield Span(rank, "optimizer", -1, optimizer, end)
