"""Cutting an order of items into one run for each partition: the fewest bytes between partitions, within limits.

With c(a, b) the bytes that the run of the items a up to b gets from others, a tensor counted once,

    f(k, b) = min over a of  f(k - 1, a) + c(a, b)        if the run a .. b is within the limit of every balance

is the least cut of the first b items into k runs, by dynamic programming. Of equal cuts the one with the least sum of
squared loads is taken: loads as shares of the whole, so that the squares of all runs together are below the byte
that makes a difference. A run that is fixed to other partitions, or without an item, is none.

The table c takes O(n^2) steps for n items, and the recurrence O(n^2) for each partition at most; limits leave about
n / partitions starts for each end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import add

from weft.partition.balanced.items import Items

SQUARES = 0.25
"""What the squared shares of a balance weigh against bytes: those of two balances stay below half a byte."""


class Runs:
    """An order of items, ready to be cut under several limits.

    Example:
        >>> from weft.graph import Graph, Unit
        >>> from weft.partition import Problem
        >>> from weft.partition.balanced.candidate import Balance
        >>> graph = Graph(Unit(name, 1, 2, 0, 0, size) for name, size in zip("abcd", (9, 9, 1, 9)))
        >>> items = Items.of(Problem(graph, 2), [Balance("operations", (1, 1, 1, 1))])
        >>> Runs(items, range(4)).cut(2, [2]), Runs(items, range(4)).cut(2, [3])
        ([0, 0, 1, 1], [0, 0, 0, 1])
    """

    def __init__(self, items: Items, order: Sequence[int]) -> None:
        self.items, self.order = items, order
        self._sums = [
            list(accumulate((weights[item] for item in order), initial=0.0)) for weights in items.weights
        ]

    def cut(self, partitions: int, limits: Sequence[float], fixed: bool = True) -> list[int] | None:
        """The partition of each item; None if no cut is within the limits.

        Args:
            partitions: How many runs there are; some are empty if there are fewer items.
            limits: For each balance the most that a partition may have.
            fixed: Whether fixed items must be on their partitions.
        """
        count = len(self.order)
        least = self._least_starts(limits)
        empty = count < partitions
        best = [0.0] + [math.inf] * count
        starts: list[list[int]] = []
        for partition in range(partitions):
            barred = self._barred(partition) if fixed else [0] * (count + 1)
            now, came = [math.inf] * (count + 1), [0] * (count + 1)
            for end in range(count + 1):
                first = max(least[end], barred[end])
                totals = list(map(add, best[first:end], self._costs[end][first:]))
                if empty:
                    totals.append(best[end])
                now[end] = min(totals, default=math.inf)
                came[end] = first + totals.index(now[end]) if totals else end
            best = now
            starts.append(came)
        if best[count] == math.inf:
            return None
        where, end = [0] * count, count
        for partition in reversed(range(partitions)):
            start = starts[partition][end]
            for item in self.order[start:end]:
                where[item] = partition
            end = start
        return where

    def _least_starts(self, limits: Sequence[float]) -> list[int]:
        """For each end the first start from which the run is within the limits."""
        return [
            max(
                (
                    bisect_left(sums, sums[end] - limit - 1e-9 * sums[-1], 0, end)
                    for sums, limit in zip(self._sums, limits, strict=True)
                ),
                default=0,
            )
            for end in range(len(self.order) + 1)
        ]

    def _barred(self, partition: int) -> list[int]:
        """For each end the first start behind all items before it that are fixed to another partition."""
        fixed = self.items.fixed
        behind = [
            place + 1 if fixed.get(item, partition) != partition else 0
            for place, item in enumerate(self.order)
        ]
        return list(accumulate(behind, max, initial=0))

    @cached_property
    def _costs(self) -> list[list[float]]:
        """For each end and start c(start, end) and the squares."""
        flows = self.items.flows
        place = {item: number for number, item in enumerate(self.order)}
        received = [
            [(flow, flows[flow][2], place[flows[flow][0]]) for flow in self.items.received[item]]
            for item in self.order
        ]
        sent = [[(flow, flows[flow][2]) for flow in self.items.sent[item]] for item in self.order]
        shares = [[value / sums[-1] for value in sums] for sums in self._sums if sums[-1]]
        costs: list[list[float]] = [[] for _ in range(len(self.order) + 1)]
        counted = [-1] * len(flows)
        for start in range(len(self.order)):
            size = 0
            for at in range(start, len(self.order)):
                for flow, amount, source in received[at]:
                    if counted[flow] != start:
                        counted[flow] = start
                        if not start <= source < at:
                            size += amount
                for flow, amount in sent[at]:
                    if counted[flow] == start:  # a circle: what went in from behind is inside now
                        size -= amount
                squares = sum((share[at + 1] - share[start]) ** 2 for share in shares)
                costs[at + 1].append(size + SQUARES * squares)
        return costs
