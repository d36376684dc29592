"""Where the spread groups go: every choice is tried, and the chain that is left is cut for each.

program        e  a  b  c  d  h        e and h are tied, three partitions
chain             a  b  c  d
e, h on 0      0  .  .  .  .  0        partition 0 has the base load e + h
best cut       0  0  1  1  2  0        for this choice; e, h on 1 and on 2 are tried too
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.partition.chain.links import Chain, Choice

SLACK = 1.0 + 1e-12
"""Loads that differ by less than this factor count as equal: they are sums of floats."""

COMBINATIONS = 1024
"""Up to so many choices for the spread groups (partitions to the power of groups) are all tried."""


class Cutter(Protocol):
    """The chain that is left after a choice, and the methods that cut it."""

    def fits(self, limit: float) -> bool:
        """True if some cut has no load above `limit`."""

    def bottleneck(self, below: float = math.inf) -> float:
        """The smallest possible largest load; infinity if that is more than `below`, or there is no cut."""

    def best(self, limit: float, effort: int) -> list[int]:
        """The starts of the best cut without a load above `limit`; `effort` bounds what telling equals apart takes."""


@dataclass(frozen=True)
class Search:
    """The search for the best placement over the choices of the spread groups' partitions.

    Attributes:
        chain: The links.
        cutter: (choice, full) to the chain that is left; `full`: partitions without a spread group must get
            a link.
        rank: How placements that are equally balanced compare: the smaller the better.
        near: For each spread group the partition to begin with, where not all choices can be tried.
    """

    chain: Chain
    cutter: Callable[[Choice, bool], Cutter]
    rank: Callable[[Sequence[int]], Any]
    near: Callable[[], Sequence[int]]

    @property
    def complete(self) -> bool:
        """True if every choice is tried."""
        return math.prod(map(len, self.chain.options)) <= COMBINATIONS

    def run(self, effort: int, below: float = math.inf) -> tuple[list[int], float] | None:
        """The best placement and its largest load; None if there is none up to `below`."""
        return self._exhaustive(effort, below) if self.complete else self._descent(effort)

    def _exhaustive(self, effort: int, below: float) -> tuple[list[int], float] | None:
        choices: list[Choice] = list(itertools.product(*self.chain.options))
        for full in (True, False):
            cutters = [self.cutter(choice, full) for choice in choices]
            limit = math.inf
            for cutter in cutters:
                limit = min(limit, cutter.bottleneck(below=min(limit / SLACK, below)))
            if limit < math.inf:
                break
        else:
            return None
        if len(cutters) == 1:
            return self.chain.placement(choices[0], cutters[0].best(limit * SLACK, effort)), limit
        fitting = [pair for pair in zip(choices, cutters, strict=True) if pair[1].fits(limit * SLACK)]
        equals = [
            self.chain.placement(choice, cutter.best(limit * SLACK, effort // len(fitting)))
            for choice, cutter in fitting
        ]
        return min(equals, key=self.rank), limit

    def _descent(self, effort: int) -> tuple[list[int], float] | None:
        """A good placement: from each group near its place in the program, move one group at a time."""
        effort //= max(1, sum(map(len, self.chain.options)))
        choice = tuple(
            near if near in options else options[0]
            for near, options in zip(self.near(), self.chain.options, strict=True)
        )
        best = self._evaluate(choice, effort)
        improved = True
        while improved:
            improved = False
            for group, options in enumerate(self.chain.options):
                for option in options:
                    candidate = (*choice[:group], option, *choice[group + 1 :])
                    found = self._evaluate(candidate, effort)
                    if found is not None and (best is None or found[0] < best[0]):
                        choice, best, improved = candidate, found, True
        return None if best is None else (best[1], best[0][1])

    def _evaluate(self, choice: Choice, effort: int) -> tuple[tuple[int, float, Any], list[int]] | None:
        """The key by which a choice's best placement is compared with those of others, and that placement."""
        for full in (True, False):
            cutter = self.cutter(choice, full)
            limit = cutter.bottleneck()
            if limit < math.inf:
                placement = self.chain.placement(choice, cutter.best(limit * SLACK, effort))
                empty = self.chain.partitions - len(set(placement))
                return (empty, limit, self.rank(placement)), placement
        return None
