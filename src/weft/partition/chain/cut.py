"""Cutting a chain of links into one segment a partition, exactly, where partitions bring loads along.

A cut is described by the starts of its segments: start 0 <= start 1 <= ... <= start P = n, and partition
`p` gets the links from `start p` up to `start p + 1`. Its load is their cost plus its base load.

(1) *The smallest largest load.* For a limit, walk the partitions and keep the interval of ends that each
    can reach: as few links as it must take, as many as fit. It is an interval because a partition that
    must take a link has no base load, so every link that fits anywhere fits there. Bisection over the
    limit gives the optimum. This is the probe of Iqbal (1991) for the bottleneck problem of Bokhari,
    "Partitioning problems in parallel, pipelined, and distributed computing", IEEE Transactions on
    Computers 37(1), 1988; base loads, windows and links that must be taken are additions.
(2) *The best among equals.* Under that limit, dynamic programming from the last partition to the first
    minimises crossings, then the sum of squared loads. What a segment adds obeys the quadrangle inequality,
    so the best end moves only forwards with the start, and divide and conquer finds the best ends
    of n starts in O(n log n). Where too many starts are left (one link outweighs all others, so nearly
    every cut is as good), only those around a cut with even loads are looked at.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from weft.partition.chain.links import Window
from weft.partition.chain.search import SLACK


@dataclass(frozen=True)
class Cut:
    """A chain and what is asked of its segments.

    Attributes:
        costs: What each link costs.
        base: The base load of each partition.
        required: For each partition whether it must get a link; then its base load is 0.
        windows: For each partition, and one past the last, the first and last start that is allowed.
        joined: For each link whether it and the one before are neighbours in the program.
        beside: (link, partition) for each neighbour in the program that lies on `partition` in any case.
    """

    costs: Sequence[float]
    base: Sequence[float]
    required: Sequence[bool]
    windows: Sequence[Window]
    joined: Sequence[bool]
    beside: Sequence[tuple[int, int]]

    @cached_property
    def _sums(self) -> list[float]:
        return list(accumulate(self.costs, initial=0.0))

    @cached_property
    def _crossing(self) -> float:
        """The weight of a crossing against squared loads: a power of two, so that sums stay exact."""
        total = self._sums[-1] + sum(self.base)
        return float(2.0 ** math.ceil(math.log2(2.0 * total * total + 1.0)))

    def fits(self, limit: float) -> bool:
        """True if some cut has no load above `limit`."""
        return bool(self._starts(limit))

    def bottleneck(self, below: float = math.inf) -> float:
        """The smallest possible largest load; infinity if that is more than `below`, or there is no cut."""
        high = min(below, (max(self.base) + self._sums[-1]) * SLACK)
        if not self.fits(high):
            return math.inf
        low = max(*self.base, *self.costs, (self._sums[-1] + sum(self.base)) / len(self.base), 0.0)
        if low >= high or self.fits(low):
            return min(low, high)
        while low < (middle := (low + high) / 2) < high:
            if self.fits(middle):
                high = middle
            else:
                low = middle
        return high

    def best(self, limit: float, effort: int) -> list[int]:
        """The starts of the best cut without a load above `limit`; there must be one (`fits`).

        Up to `effort` starts are compared; of more, only those around an even cut.
        """
        windows = self._pruned(limit)
        if sum(last - first for first, last in windows) > effort:
            reach = max(1, effort // (2 * len(windows)))
            windows = [
                (max(first, start - reach), min(last, start + reach))
                for (first, last), start in zip(windows, self._even(windows, limit), strict=True)
            ]
        after = [0.0]
        ends: list[list[int]] = []
        for partition in reversed(range(len(self.base))):
            after, chosen = self._before(partition, windows[partition : partition + 2], after, limit)
            ends.insert(0, chosen)
        starts = [0]
        for (first, _), chosen in zip(windows, ends, strict=False):
            starts.append(chosen[starts[-1] - first])
        return starts

    def _starts(self, limit: float) -> list[Window]:
        """(1) For each partition, and one past the last, the starts that can be reached; [] if no end can."""
        first = last = 0
        reached = [(0, 0)]
        for base, required, (low, high) in zip(self.base, self.required, self.windows[1:], strict=True):
            first = max(first + required, low)
            last = min(self._farthest(last, limit - base), high)
            if base > limit or first > last:
                return []
            reached.append((first, last))
        return reached

    def _pruned(self, limit: float) -> list[Window]:
        """The starts that can be reached and from which the end can be reached."""
        windows = self._starts(limit)
        first = last = len(self.costs)
        for partition in reversed(range(len(self.base))):
            room = limit * SLACK - self.base[partition]
            first = bisect_left(self._sums, self._sums[first] - room)
            last = last - self.required[partition]
            low, high = windows[partition]
            first, last = windows[partition] = max(first, low), min(last, high)
        return windows

    def _even(self, windows: Sequence[Window], limit: float) -> list[int]:
        """The starts of a cut whose partitions each take the mean of what is left to the rest."""
        starts = [0]
        rest = sum(self.base)
        for partition, (base, required) in enumerate(zip(self.base, self.required, strict=True)):
            start = starts[-1]
            mean = (self._sums[-1] - self._sums[start] + rest) / (len(self.base) - partition)
            rest -= base
            first, last = windows[partition + 1]
            wanted = bisect_left(self._sums, self._sums[start] + mean - base)
            last = min(last, self._farthest(start, limit - base))
            starts.append(max(first, start + required, min(wanted, last)))
        return starts

    def _farthest(self, start: int, room: float) -> int:
        """Where a segment from `start` ends at most."""
        return bisect_right(self._sums, self._sums[start] + room) - 1

    def _before(
        self, partition: int, windows: Sequence[Window], after: list[float], limit: float
    ) -> tuple[list[float], list[int]]:
        """(2) For each start of `partition` the least that it and all after it add, and its best end.

        `after` holds that for each start of the next partition. Among equals the last end wins.
        """
        (first, last), (first_end, last_end) = windows
        base, sums = self.base[partition], self._sums
        tails = [
            value + self._crossing * apart
            for value, apart in zip(after, self._apart(partition, windows[1]), strict=True)
        ]
        apart = self._apart(partition, windows[0])
        values = [math.inf] * (last - first + 1)
        chosen = [-1] * (last - first + 1)
        ranges = [(first, last, first_end, last_end)]
        while ranges:
            low, high, low_end, high_end = ranges.pop()
            if low > high:
                continue
            start = (low + high) // 2
            least, best, unloaded = sys.float_info.max, -1, sums[start] - base
            stop = min(high_end, self._farthest(start, limit - base))
            for end in range(max(low_end, start + 1), stop + 1):
                load = sums[end] - unloaded
                value = load * load + tails[end - first_end]
                if value <= least:
                    least, best = value, end
            if best >= 0:
                crossings = (start > 0 and self.joined[start]) - apart[start - first]
                values[start - first], chosen[start - first] = least + self._crossing * crossings, best
            ranges.append((low, start - 1, low_end, best if best >= 0 else high_end))
            ranges.append((start + 1, high, best if best >= 0 else low_end, high_end))
        if not self.required[partition]:
            for start in range(max(first, first_end), min(last, last_end) + 1):
                value = after[start - first_end] + base * base
                if value < values[start - first]:
                    values[start - first], chosen[start - first] = value, start
        return values, chosen

    def _apart(self, partition: int, window: Window) -> list[int]:
        """For the starts of a window: how many neighbours of the links before lie elsewhere, were these here."""
        links = sorted(link for link, elsewhere in self.beside if elsewhere != partition)
        return [bisect_left(links, start) for start in range(window[0], window[1] + 1)]
