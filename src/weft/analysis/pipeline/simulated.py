"""Steps with other numbers of microbatches and other schedules: simulated, with the recorded means as costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from weft.analysis.pipeline.work import Stages, by_partition
from weft.analysis.replay import Replay
from weft.errors import ScheduleError
from weft.plan.option import Option, Placed
from weft.plan.search import VISIT, search
from weft.schedule import CHUNKS, in_flight, make
from weft.simulate import Links, Simulation, StageCost, as_weft_runs
from weft.topology.cluster import Link

MOST_TIMES = 8
"""No more times the microbatches are tried, for nothing says then how long work on so little takes."""
EXPLAINED = 0.10
"""What is simulated counts only where the simulation of what ran differs from it by no more than this share."""
NEAR = 0.9
"""Of fewer microbatches the largest number that saves this share of the most is taken: it needs the least memory."""
ALIKE = 0.01
"""Of numbers of microbatches whose steps differ by less than this share, the one nearest to the present is taken."""


class Other(NamedTuple):
    """Another schedule or number of microbatches, and the seconds of a step that it saves."""

    microbatches: int
    schedule: str
    saved_s: float
    held: int
    """How many microbatches the rank that holds most of them holds at once."""
    held_now: int


@dataclass(frozen=True)
class Simulated:
    """The recorded pipeline as it can be simulated.

    Attributes:
        stages: What was measured.
        schedule: The name of the present schedule.
        links: What a message takes: the median between two ranks.
        replayed_s: The recorded step without all that lies before the first and after the last action.
    """

    stages: Stages
    schedule: str
    links: Links
    replayed_s: float

    @property
    def ranks(self) -> int:
        """The number of partitions."""
        return max(self.stages.rank_of_stage) + 1

    @property
    def chunks(self) -> int:
        """The number of stages of each rank."""
        return len(self.stages.rank_of_stage) // self.ranks

    def step(self, microbatches: int) -> Simulation:
        """The step with so many microbatches, as weft's ranks run it."""
        made = make(self.schedule, self.ranks, microbatches, chunks=self.chunks)
        return as_weft_runs(made, self.stages.costs(microbatches), self.links)

    @cached_property
    def now(self) -> Simulation:
        """The step as it is."""
        return self.step(self.stages.microbatches)

    @property
    def unexplained(self) -> float:
        """By which share the simulation of what ran differs from it."""
        return abs(self.now.step_s / self.replayed_s - 1.0) if self.replayed_s else math.inf

    @property
    def explains(self) -> bool:
        """The simulation can be believed."""
        return self.unexplained <= EXPLAINED

    def with_work(self, factors: Mapping[int, float]) -> Simulation:
        """The step, as weft's ranks run it, if the work of each partition takes so many times as long."""
        times = {
            (stage, kind): seconds * factors[self.stages.rank_of_stage[stage]]
            for (stage, kind), seconds in self.stages.times.items()
        }
        return replace(self, stages=replace(self.stages, times=times)).now

    def share(self, saved_s: float, step_s: float) -> float:
        """The saving as a share of the whole step, scaled so that the simulation's error touches the gain only."""
        return saved_s / self.now.step_s * self.replayed_s / step_s


def simulated(
    replay: Replay, stages: Stages | None, partitions: Mapping[int, int], schedule: str
) -> Simulated | None:
    """The simulation of the pipeline; None where the stages are not those of a schedule that follows from numbers
    alone.
    """
    if stages is None:
        return None
    ranks = max(stages.rank_of_stage) + 1
    chunks = len(stages.rank_of_stage) // ranks
    if ranks < 2:
        return None
    try:
        layout = make(schedule, ranks, 1, chunks=chunks).rank_of_stage
    except ScheduleError:
        return None
    if layout != stages.rank_of_stage:
        return None
    only = replay.scaled(lambda node: 1.0 if node in stages.inner else 0.0)
    return Simulated(stages, schedule, _links(replay, partitions), only.step_s)


def saved_by_work(
    replay: Replay, partitions: Mapping[int, int], factors: Mapping[int, float], present: Simulated | None
) -> float:
    """The share of a step that is saved if the work of each partition takes so many times as long; below 0 if it grows.

    Ranks run what is ready, so that with other work they have another order, in which a slow partition's neighbours no
    longer wait: it is simulated. Only where that does not explain what ran are the steps replayed in their own order.
    """
    if present is not None and present.explains:
        return present.share(present.now.step_s - present.with_work(factors).step_s, replay.step_s)
    return 1.0 - replay.scaled(by_partition(factors, partitions)).step_s / replay.step_s


def _links(replay: Replay, partitions: Mapping[int, int]) -> Links:
    took: dict[tuple[int, int], list[float]] = {}
    for node, needs in zip(replay.nodes, replay.needs, strict=True):
        for need in needs:
            pair = partitions[replay.nodes[need.node].rank], partitions[node.rank]
            if need.message:
                took.setdefault(pair, []).append(need.transfer_s)
    links = {
        pair: Link(latency_s=statistics.median(each), name=f"{pair[0]}-{pair[1]}")
        for pair, each in took.items()
    }
    return Links(lambda sender, receiver: links.get((sender, receiver), Link(name="none")))


def numbers(microbatches: int, samples: int) -> list[int]:
    """The numbers of microbatches that are tried: those that divide the mini-batch, if its samples are known.

    >>> numbers(8, 32), numbers(3, 0), numbers(1, 6)
    ([4, 2, 1, 16, 32], [6, 12, 24], [2])
    """
    tried, fewer = [], microbatches
    while fewer % 2 == 0:
        fewer //= 2
        tried.append(fewer)
    more = 2
    while more <= MOST_TIMES:
        tried.append(more * microbatches)
        more *= 2
    return [number for number in tried if not samples or samples % number == 0]


def best_number(present: Simulated, samples: int) -> Other | None:
    """Another number of microbatches that takes less time; nothing if none does."""
    now = present.now
    steps = {number: present.step(number) for number in numbers(present.stages.microbatches, samples)}
    if not steps:
        return None
    least_s = min(step.step_s for step in steps.values())
    fewer_s = max(ALIKE * now.step_s, (1.0 - NEAR) * (now.step_s - least_s))
    near = [
        number
        for number, step in steps.items()
        if step.step_s <= least_s + (fewer_s if number < present.stages.microbatches else ALIKE * now.step_s)
    ]
    best = min(near, key=lambda number: max(number, present.stages.microbatches))
    saved_s = now.step_s - steps[best].step_s
    if saved_s <= 0.0:
        return None
    return Other(best, present.schedule, saved_s, _held(steps[best]), _held(now))


def best_schedule(present: Simulated, units: int) -> Other | None:
    """Another schedule that takes less time, with the same work on each rank; nothing if none does.

    A schedule with several stages a rank is tried where there are units enough: each rank's work is shared equally by
    its stages.
    """
    count, ranks = present.stages.microbatches, present.ranks
    work: list[list[StageCost]] = [[] for _ in range(ranks)]
    for rank, cost in zip(present.stages.rank_of_stage, present.stages.costs(count), strict=True):
        work[rank].append(cost)

    def put(layout: Sequence[int]) -> Placed:
        shares = [layout.count(rank) for rank in range(ranks)]
        return Placed(tuple(_shared(work[rank], shares[rank]) for rank in layout))

    tried = [
        Option(name, chunks=least if most is None else None)
        for name, (least, most) in CHUNKS.items()
        if least == 1 or units >= least * ranks
    ]
    now = present.now
    for found in search(ranks, count, put, present.links, tried=tried):
        if found.fault or found.step is None:
            continue
        if found.option.schedule == present.schedule or found.step_s >= now.step_s * (1.0 - 1e-9):
            return None
        saved_s = now.step_s - found.step_s * (1.0 + VISIT * (found.step.stages // ranks - 1))
        return (
            Other(count, found.option.schedule, saved_s, _held(found.step), _held(now))
            if saved_s > 0.0
            else None
        )
    return None


def _held(step: Simulation) -> int:
    """Stages' microbatches in stages of a rank's whole work."""
    return math.ceil(max(map(in_flight, step.actions)) * len(step.actions) / step.stages)


def _shared(costs: Sequence[StageCost], parts: int) -> StageCost:
    """One of so many equal stages that together do what these do."""
    return StageCost(
        *(sum(getattr(cost, name) for cost in costs) / parts
          for name in ("forward_s", "backward_s", "input_s", "weight_s"))
    )  # fmt: skip
