"""Costs and samples of a run, as far as the changes need them, and the ranks that have the same partition."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from weft.analysis.replay import Replay
from weft.analysis.run import Facts, Run, Step, Unit
from weft.timeline import Timeline


class Measured(Protocol):
    """An analysis, for those who are used by it; see `weft.analysis.analysis.Analysis`."""

    run: Run

    @property
    def timeline(self) -> Timeline:
        """The recorded spans."""

    @property
    def step_s(self) -> float:
        """The mean time from one usual step to the next."""

    @property
    def replay(self) -> Replay:
        """Usual steps that can be run again."""

    @property
    def partitions(self) -> Mapping[int, int]:
        """For each rank its partition."""

    @property
    def partition_work(self) -> Mapping[int, float]:
        """For each partition the seconds of a usual step."""

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of a rank that trained."""

    def setting(self, name: str, default: object = None) -> object:
        """A setting of the run."""


def partitions_of(ranks: Sequence[int], facts: Mapping[int, Facts]) -> dict[int, int]:
    """For each rank its partition. Where ranks did not say, or contradict each other, each has one of its own."""
    known = [facts[rank] for rank in ranks if rank in facts]
    if len(known) == len(ranks) == len({(each.pp_rank, each.rdp_rank) for each in known}):
        return {each.rank: each.pp_rank for each in known}
    return {rank: number for number, rank in enumerate(ranks)}


def copies_of(partitions: Mapping[int, int]) -> dict[int, list[int]]:
    """For each rank the others that have its partition."""
    return {
        rank: [other for other, there in partitions.items() if there == partition and other != rank]
        for rank, partition in partitions.items()
    }


def units_of(run: Run) -> tuple[Unit, ...]:
    """Those of the models, if they were split."""
    return next((facts.units for facts in run.facts.values() if facts.units), ())


def pass_costs(run: Run) -> dict[int, tuple[float, float]]:
    """For each partition what its units were measured to take for one microbatch: forward and backward, in seconds."""
    found: dict[int, tuple[float, float]] = {}
    for unit in units_of(run):
        forward_s, backward_s = found.get(unit.partition, (0.0, 0.0))
        found[unit.partition] = forward_s + unit.forward_s, backward_s + unit.backward_s
    return found


def samples_of(analysis: Measured) -> float:
    """The samples of one step of all copies together; 0 if that is not known.

    Ranks of one copy have the same mini-batch: those of its pipeline, and those that split its weights.
    """
    samples: dict[int, float] = {}
    for rank in analysis.partitions:
        own = [step.samples for step in analysis.steps(rank)]
        samples[rank] = statistics.median(own) if own else 0.0
    facts = {rank: analysis.run.facts[rank] for rank in samples if rank in analysis.run.facts}
    places = Counter((each.pp_rank, each.rdp_rank) for each in facts.values())
    if len(facts) == len(samples) and set(places.values()) == {_sharding_degree(analysis)}:
        copies: dict[int, float] = {}
        for rank, each in facts.items():
            copies[each.rdp_rank] = max(samples[rank], copies.get(each.rdp_rank, 0.0))
        return sum(copies.values())
    found: dict[int, float] = {}
    for rank, partition in analysis.partitions.items():
        found[partition] = found.get(partition, 0.0) + samples[rank]
    return max(found.values(), default=0.0)


def _sharding_degree(analysis: Measured) -> int:
    """The number of ranks that shard the weights or the sequences of a partition."""
    degrees = [analysis.setting(name, 1) for name in ("tensor_parallel_degree", "context_parallel_degree")]
    return math.prod(degree for degree in degrees if isinstance(degree, int))
