"""What was measured: one step seen by one rank, by all ranks, and everything known about a contender."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from benchmarks import machine


@dataclass(frozen=True)
class RankStep:
    """One step as one rank saw it. Clocks are the machine's, hence comparable between ranks."""

    start_s: float
    end_s: float
    window_s: float
    """From the meeting before this step to the one after it: the time `cpu_s` and `busy_s` belong to."""
    cpu_s: float
    """User and system time of this process, all threads."""
    busy_s: float
    """Processor time that the machine spent on anything."""
    pace_s: float = 0.0
    """What `machine.pace_s` was before the step or after it, the larger one."""


@dataclass(frozen=True)
class RankMemory:
    base_bytes: int
    parameter_bytes: int
    peak_bytes: int

    @property
    def above_model_bytes(self) -> int:
        return self.peak_bytes - self.base_bytes - self.parameter_bytes


@dataclass(frozen=True)
class Step:
    """One step of one contender, its ranks taken together."""

    wall_s: float
    cpu_s: float
    other_cores: float
    pace_s: float = 0.0
    """That of the slowest core."""
    ranks_cpu_s: tuple[float, ...] = ()
    """`cpu_s` of each rank; what is left to `wall_s` it waited."""

    @property
    def quiet(self) -> bool:
        return self.other_cores <= machine.QUIET_CORES


def together(ranks: tuple[RankStep, ...]) -> Step:
    cpu_s = sum(rank.cpu_s for rank in ranks)
    wall_s = max(rank.end_s for rank in ranks) - min(rank.start_s for rank in ranks)
    other_cores = max(0.0, ranks[0].busy_s - cpu_s) / ranks[0].window_s
    ranks_cpu_s = tuple(rank.cpu_s for rank in ranks)
    return Step(wall_s, cpu_s, other_cores, max(rank.pace_s for rank in ranks), ranks_cpu_s)


@dataclass
class Record:
    """What is known about one contender."""

    name: str
    first: Step
    gradient_difference: float = 0.0
    steps: list[Step] = field(default_factory=list)
    memory: list[RankMemory] = field(default_factory=list)
    best_pace_s: float = math.inf
    """The shortest that any contender's cores had in this run."""
    plan: str = ""
    """What the contender decided by itself, in words."""

    def kept(self) -> list[Step]:
        """The steps that count: those that had the machine for themselves, and its cores at full speed."""
        return [s for s in self.steps if s.quiet and s.pace_s <= machine.STEADY * self.best_pace_s]
