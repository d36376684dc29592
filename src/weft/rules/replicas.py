"""Rules about ranks that do the same: slow ones, sums of gradients, what a small share of a batch changes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from weft.analysis.analysis import Analysis
from weft.analysis.measured import pass_costs
from weft.rules.measures import core_time, mean, microbatches, number_of, of_partition, percent, share
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class StragglerRank(Rule):
    """Is one rank slower than others that do the same work?

    The time that its work should take by the time that it takes: as replicas of its partition show, else the costs by
    which the model was split. Without replicas only a rank counts that had its core for at most `lost_core` of what the
    others had it, or lost it more often; without costs, one for which both are so.
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
        slowest = sorted(analysis.steps(rank), key=lambda step: -step.work_s)[:3]
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
            steps=sorted(step.step for step in slowest),
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


@dataclass(frozen=True)
class LoadBalancing(Rule):
    """Are ranks that have the same partition busy to different degrees?

    Compared is which share of each step a rank worked, as histograms of ten bins: by their Jensen-Shannon distance,
    where the medians differ by `least_difference` as well.
    """

    threshold: float = 0.5
    patience: int = 5
    least_difference: float = 0.10

    def evaluate(self, analysis: Analysis) -> Finding:
        groups = [ranks for ranks in of_partition(analysis).values() if len(ranks) > 1]
        if not groups:
            return self.not_applicable("no two ranks have the same partition")
        busy = {
            rank: [each.work / each.total for each in own.values() if each.total > 0][1:]
            for rank, own in analysis.parts.items()
        }
        if min(len(busy[rank]) for ranks in groups for rank in ranks) < self.patience:
            return self.abstain(f"fewer than {self.patience} steps with spans on some rank")
        pairs = {
            pair: distance(busy[pair[0]], busy[pair[1]])
            for ranks in groups
            for pair in combinations(ranks, 2)
            if abs(median(busy[pair[0]]) - median(busy[pair[1]])) >= self.least_difference
        }
        one, other = max(pairs, key=lambda pair: pairs[pair], default=(0, 0))
        if not pairs or pairs[one, other] <= self.threshold:
            return self.passed("ranks with the same partition are busy alike")
        return self.warning(
            f"rank {one} works {percent(median(busy[one]))} of its steps, rank {other} {percent(median(busy[other]))}",
            evidence={f"distance of ranks {a} and {b}": round(far, 3) for (a, b), far in pairs.items()},
            advice=["give all replicas samples of alike sizes, and cores of their own"],
            ranks=[one, other],
        )


def distance(first: Sequence[float], second: Sequence[float], bins: int = 10) -> float:
    """The Jensen-Shannon distance of two sets of shares from 0 to 1, with natural logarithms: from 0 to 0.833.

    With M the mean of the histograms P and Q it is the root of (KL(P, M) + KL(Q, M)) / 2. The last bin has the
    share 1, too.

    >>> distance([0.1, 0.3], [0.1, 0.3]), round(distance([0.05], [1.0]), 3)
    (0.0, 0.833)
    """
    one, other = _histogram(first, bins), _histogram(second, bins)
    middle = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    divergence = sum(
        share * math.log(share / mean)
        for shares in (one, other)
        for share, mean in zip(shares, middle, strict=True)
        if share > 0
    )
    return math.sqrt(max(0.0, divergence / 2))


def _histogram(shares: Sequence[float], bins: int) -> list[float]:
    counts = [0] * bins
    for busy in shares:
        counts[min(bins - 1, max(0, int(busy * bins)))] += 1
    return [count / len(shares) for count in counts]


@dataclass(frozen=True)
class AllReduceExposed(Rule):
    """Do ranks wait for the sums of gradients over the replicas?

    The share of a step, the mean over ranks. Sums beside work do not count.
    """

    explains = ("LowGPUUtilization",)

    warn: float = 0.05
    severe: float = 0.15

    def evaluate(self, analysis: Analysis) -> Finding:
        copies = 1 + max((analysis.facts(rank).rdp_rank for rank in analysis.ranks), default=0)
        exposed = share(analysis, lambda parts: parts.reduce)
        if copies < 2 and not exposed:
            return self.not_applicable("there is one replica")
        hosts = {analysis.facts(rank).host for rank in analysis.ranks}
        advice = [] if analysis.setting("compression") else ['send fewer bytes: `"compression": "int8"`']
        if len(hosts) > 1:
            advice.append('add up on each host first: `"all_reduce": "hierarchical"`')
        cut = number_of(analysis, "microbatches")
        advice.append(f'take larger mini-batches, cut into more: `"microbatches": {2 * cut}`')
        return self.graded(
            f"ranks wait for sums of gradients for {percent(exposed)} of a step",
            (exposed, self.warn, self.severe),
            evidence={"exposed": percent(exposed), "replicas": copies, "hosts": len(hosts)},
            advice=advice,
            gain=analysis.what_if.gain("no reduce"),
            ranks=analysis.ranks,
        )


@dataclass(frozen=True)
class SmallBatchNorm(Rule):
    """Does batch normalisation take its means over so few samples that they are noise?

    Each replica and microbatch is normalised for itself, but for `SyncBatchNorm` over all replicas.
    """

    least_steps = 0

    least: int = 16
    severe: int = 4

    def evaluate(self, analysis: Analysis) -> Finding:
        samples = number_of(analysis, "batch_norm_samples", 0)
        if any("TensorFlow" in facts.versions for facts in analysis.run.facts.values()):
            return self.not_applicable("with TensorFlow the samples of batch normalisation are not recorded")
        if not samples:
            return self.not_applicable("no batch normalisation trained")
        cut = number_of(analysis, "microbatches")
        copies = 1 + max((analysis.facts(rank).rdp_rank for rank in analysis.ranks), default=0)
        advice = ["give each step a larger mini-batch"]
        if copies > 1:
            advice.insert(0, "normalise over all copies: `weft.convert_sync_batchnorm(model)`")
        if cut > 1:
            advice.append(
                f'cut the mini-batch into fewer: `"microbatches": {max(1, cut * samples // self.least)}`'
            )
        return self.graded(
            f"batch normalisation takes its means over {samples} samples",
            (-samples, -self.least, -self.severe),
            evidence={"samples": samples, "microbatches": cut},
            advice=advice,
            ranks=analysis.ranks,
        )
