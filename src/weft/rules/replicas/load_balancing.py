"""Copies of a partition that are busy to different degrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from weft.analysis.analysis import Analysis
from weft.rules.measures import of_partition, percent
from weft.rules.rule import Finding, Rule


@dataclass(frozen=True)
class LoadBalancing(Rule):
    """Are ranks that have the same partition busy to different degrees?

    Compared is which share of each step a rank worked, as histograms of ten bins: by their Jensen-Shannon distance,
    where the medians differ by `least_difference` as well. The share of a GPU's time would not show it, since
    kernels that wait for others count there as work.
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
    for share in shares:
        counts[min(bins - 1, max(0, int(share * bins)))] += 1
    return [count / len(shares) for count in counts]
