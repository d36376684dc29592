"""A rank that is slower than it should be."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from weft.analysis.analysis import Analysis
from weft.analysis.measured import pass_costs
from weft.rules.measures import core_time, mean, microbatches, of_partition, percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class StragglerRank(Rule):
    """Is one rank slower than others that do the same work?

    The score is the time that its work should take by the time that it takes. With replicas the same partition of the
    other copies shows what it should take. Without them the costs by which the model was split do, if the rank had its
    core for at most `lost_core` of what the others had it, or lost it more often; a partition may also be heavy.
    Without costs both must be so, for a rank may also wait for something of its own.
    """

    explains = (
        "PartitionImbalance", "LastPartitionHeavy", "PipelineBubble", "AllReduceExposed", "LoadBalancing",
        "LowGPUUtilization",
    )  # fmt: skip

    warn: float = 0.90
    severe: float = 0.70
    lost_core: float = 0.85

    def evaluate(self, analysis: Analysis) -> Finding:
        scores = _by_peers(analysis)
        by_peers = bool(scores)
        if not by_peers:
            scores = self._by_cores(analysis)
        if not scores:
            return self.abstain(
                "there are no replicas to compare with, and no processor times of several ranks"
            )
        rank = min(scores, key=lambda each: scores[each])
        facts = analysis.facts(rank)
        where = f" on {facts.host}" if facts.host else ""
        return self.graded(
            f"rank {rank}{where} runs at {percent(scores[rank])} of the speed of its peers",
            (-scores[rank], -self.warn, -self.severe),
            evidence={f"speed of rank {each}": percent(score) for each, score in sorted(scores.items())}
            | self._signs(analysis, rank),
            advice=[
                f"look what else runs on the cores of rank {rank} (`top`), and stop it or keep it on other cores "
                "(`taskset`)",
                "if nothing does, look at that host's clock and temperature, or leave the host out",
            ],
            gain=_gain(analysis, rank, scores[rank]),
            ranks=[rank],
            steps=_slowest_steps(analysis, rank),
        )

    def _by_cores(self, analysis: Analysis) -> dict[int, float]:
        """Scores of ranks without peers: below 1 only for those that lost their cores more than the others."""
        had = {rank: share for rank in analysis.ranks if (share := core_time(analysis, rank)) is not None}
        if len(had) < 2:
            return {}
        expected = _by_split(analysis)
        found = {}
        for rank, share in had.items():
            others = statistics.median(had[other] for other in had if other != rank)
            relative = min(1.0, share / others) if others else 1.0
            lost, preempted = relative <= self.lost_core, _preempted_more(analysis, rank)
            if rank in expected and (lost or preempted):
                found[rank] = max(expected[rank], relative) if lost else expected[rank]
            else:  # without preemption it waits for something of its own, a disk say
                found[rank] = relative if lost and preempted else 1.0
        return found

    def _signs(self, analysis: Analysis, rank: int) -> dict[str, object]:
        """Evidence that the rank lost its core."""
        found: dict[str, object] = {"lost its core a step": f"{_preempted(analysis, rank):.0f} times"}
        if (share := core_time(analysis, rank)) is not None:
            found["had its core"] = f"{percent(share)} of its work"
        host = analysis.run.samples.get(analysis.facts(rank).host, ())
        if host:
            found["processes outside of the job"] = (
                f"{percent(mean(each.others for each in host))} of all cores"
            )
        return found


def _by_peers(analysis: Analysis) -> dict[int, float]:
    """For ranks whose partition others have as well: what those take by what this one takes."""
    found = {}
    for ranks in of_partition(analysis).values():
        for rank in ranks:
            peers = [analysis.typical[other].work for other in ranks if other != rank]
            if peers and analysis.typical[rank].work > 0:
                found[rank] = min(1.0, statistics.median(peers) / analysis.typical[rank].work)
    return found


def _by_split(analysis: Analysis) -> dict[int, float]:
    """For ranks of which it is known, what their units were measured to take by what they take; the best has 1."""
    costs = pass_costs(analysis.run)
    speeds = {}
    for rank, parts in analysis.typical.items():
        own = costs.get(analysis.partitions[rank])
        if own is not None and parts.work > 0:
            speeds[rank] = sum(own) * microbatches(analysis) / parts.work
    best = max(speeds.values(), default=0.0)
    return {rank: speed / best for rank, speed in speeds.items() if len(speeds) > 1 and best > 0}


def _preempted(analysis: Analysis, rank: int) -> float:
    return mean(step.preempted for step in analysis.steps(rank))


def _preempted_more(analysis: Analysis, rank: int) -> bool:
    """It lost its core more than twice a step, and more than twice as often as the others."""
    others = mean(_preempted(analysis, other) for other in analysis.ranks if other != rank)
    return _preempted(analysis, rank) > max(2.0, 2 * others)


def _gain(analysis: Analysis, rank: int, score: float) -> float | None:
    """The share of a step that is saved if the rank runs at its peers' speed."""
    change = analysis.what_if.change("straggler")
    if change is not None and rank in change.ranks:
        return change.gain
    if rank not in analysis.typical or not analysis.step_s:
        return None
    return (1 - score) * analysis.typical[rank].work / analysis.step_s


def _slowest_steps(analysis: Analysis, rank: int) -> list[int]:
    steps = sorted(analysis.steps(rank), key=lambda step: -step.work_s)
    return sorted(step.step for step in steps[:3])
