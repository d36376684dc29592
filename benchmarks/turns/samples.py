"""What was measured: one step seen by one rank, by all ranks, and everything known about a contender."""

from __future__ import annotations

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

    @property
    def quiet(self) -> bool:
        return self.other_cores <= machine.QUIET_CORES


def together(ranks: tuple[RankStep, ...]) -> Step:
    cpu_s = sum(rank.cpu_s for rank in ranks)
    wall_s = max(rank.end_s for rank in ranks) - min(rank.start_s for rank in ranks)
    return Step(wall_s, cpu_s, max(0.0, ranks[0].busy_s - cpu_s) / ranks[0].window_s)


@dataclass
class Record:
    """What is known about one contender."""

    name: str
    first: Step
    gradient_difference: float = 0.0
    steps: list[Step] = field(default_factory=list)
    memory: list[RankMemory] = field(default_factory=list)
