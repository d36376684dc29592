"""Another split between two steps, where ranks take longer than those that the present split was made for.

Units keep the proportions of their traced times. A rank's speed is what its units took in the trace over what they take
now. The split that is best for these speeds is simulated beside the present one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from weft.config import Settings
from weft.errors import PlacementError
from weft.graph.model import Graph
from weft.partition.chain.exact import exact
from weft.partition.problem import Device, Problem
from weft.plan.chosen import Execution, execution
from weft.plan.stages import on_stages
from weft.plan.v_apex import EFFORT
from weft.schedule import Schedule
from weft.simulate import FREE, Simulation, as_weft_runs

NOISE = 0.1
"""A rank differs from what the split was made for if it takes more than this part longer, beside the quickest."""
GAIN = 0.1
"""Units move if the step is expected to be shorter by more than this part."""


@dataclass(frozen=True)
class Present:
    """A split that runs.

    Attributes:
        graph: The units in the order of the program; units that must stay together have a group.
        stages: The stage of each unit.
        schedule: Its order of actions, and the rank of each stage.
        speeds: How fast each rank is by what it was made for; empty where all are alike.
        memory_weight: What was balanced: 0 is time, 1 is memory.
        memory_bytes: What a rank has; any amount if not given.
        how: The manner in which ranks run it.
    """

    graph: Graph
    stages: tuple[int, ...]
    schedule: Schedule
    speeds: tuple[float, ...] = ()
    memory_weight: float = 0.0
    memory_bytes: float | None = None
    how: Execution = field(default_factory=lambda: execution(Settings(), False))

    def work_s(self) -> list[float]:
        """Seconds of one microbatch by rank, as traced."""
        found = [0.0] * len(self.schedule.ranks)
        for unit, stage in zip(self.graph.units, self.stages, strict=True):
            found[self.schedule.rank_of_stage[stage]] += unit.time_ms / 1e3
        return found

    def step(self, stages: Sequence[int], speeds: Sequence[float]) -> Simulation:
        """A step with the units on these stages, at these speeds."""
        placed = on_stages(self.graph, stages, self.schedule.rank_of_stage, speeds=speeds)
        return as_weft_runs(self.schedule, placed.stages, FREE, **self.how)

    def neighbours(self, stages: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The splits in which one unit beside a cut is on the other side; none where a simulation takes too long."""
        if sum(map(len, self.schedule.ranks)) > EFFORT:
            return
        for at, (before, after) in enumerate(pairwise(stages)):
            if before == after:
                continue
            for changed in ((at, after), (at + 1, before)):
                found = [*stages]
                found[changed[0]] = changed[1]
                ranks = {
                    (unit.group or number, self.schedule.rank_of_stage[stage])
                    for number, (unit, stage) in enumerate(zip(self.graph.units, found, strict=True))
                }
                if len(ranks) == len({group for group, _ in ranks}) and {*found} == {*stages}:
                    yield tuple(found)


@dataclass(frozen=True)
class Better:
    """A split that takes over.

    Attributes:
        stages: The stage of each unit.
        speeds: How fast each rank is, as measured.
        late: How many times as long as the split was made for each rank took, beside the quickest: see `find_split`.
        present_s: What the present split's step takes at these speeds.
        step: The step that is expected.
    """

    stages: tuple[int, ...]
    speeds: tuple[float, ...]
    late: tuple[float, ...]
    present_s: float
    step: Simulation


def find_split(present: Present, steps: Sequence[Sequence[float]]) -> Better | None:
    """The split that takes over after these steps; None where the present one stays.

    It stays unless a rank was late in four of five steps: other work comes and goes.

    ``steps``: of each the seconds that each rank was busy with a microbatch.
    """
    work_s = present.work_s()
    if not all(work_s) or not all(map(all, steps)):
        return None
    late = _late(steps, [work / speed for work, speed in zip(work_s, _speeds(present), strict=True)])
    if max(late) <= 1 + NOISE:
        return None
    busy_s = [median(own) for own in zip(*steps, strict=True)]
    speeds = tuple(work / busy for work, busy in zip(work_s, busy_s, strict=True))
    layout = present.schedule.rank_of_stage
    try:
        even = tuple(by_speed(present.graph, speeds, layout, present.memory_weight))
    except PlacementError:
        return None
    stages = _shifted(present, even, speeds)
    now, then = present.step(present.stages, speeds), present.step(stages, speeds)
    limit = present.memory_bytes
    if then.step_s >= (1 - GAIN) * now.step_s or (limit is not None and max(then.peak_bytes) > limit):
        return None
    return Better(stages, speeds, tuple(late), now.step_s, then)


def _shifted(present: Present, stages: tuple[int, ...], speeds: Sequence[float]) -> tuple[int, ...]:
    """The split with cuts shifted by a unit as long as the simulated step gets shorter.

    A pipeline fills and drains, so even stages are not always the best.
    """
    best_s = present.step(stages, speeds).step_s
    while True:
        tried = [(present.step(each, speeds).step_s, each) for each in present.neighbours(stages)]
        least_s, found = min(tried, default=(best_s, stages))
        if least_s >= best_s * (1 - 1e-9):
            return stages
        best_s, stages = least_s, found


def _speeds(present: Present) -> Sequence[float]:
    return present.speeds or (1.0,) * len(present.schedule.ranks)


def _late(steps: Sequence[Sequence[float]], expected_s: Sequence[float]) -> list[float]:
    """The factor by which each rank took longer than expected, beside the quickest, at least in four of five steps.

    >>> _late([[1.0, 2.2], [1.1, 2.2]], [1.0, 1.0])
    [1.0, 2.0]
    """
    shares = [[busy / expected for busy, expected in zip(step, expected_s, strict=True)] for step in steps]
    late = zip(*([share / min(step) for share in step] for step in shares), strict=True)
    return [sorted(own)[len(own) // 5] for own in late]


def by_speed(
    graph: Graph, speeds: Sequence[float], layout: Sequence[int], memory_weight: float
) -> Sequence[int]:
    """The stage of each unit where ranks are unlike: the slowest stage is as quick as it can be.

    ``layout``: the rank of each stage. ``memory_weight``: what is balanced; 0 is time.

    Raises:
        PlacementError: The units cannot be placed.
    """
    devices = tuple(Device(speeds[rank] / max(speeds)) for rank in layout)
    waiting = (max(1, (len(speeds) + 1) // 2),) * len(layout)
    problem = Problem(graph, len(layout), devices=devices, memory_weight=memory_weight, in_flight=waiting)
    return exact(problem).partitions
