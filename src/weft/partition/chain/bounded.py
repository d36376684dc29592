"""Cutting a chain exactly where partitions differ: transfers at cuts, memory limits, unequal devices.

As in `cut`, partition `p` gets the links from `start p` up to `start p + 1`. Its load is

    load(p, a, b) = base(p) + sums(p)[b] - sums(p)[a] + live[a] + live[b] - passing(a, b)

`live[x]` is what the tensors cost that some link before `x` makes and some link from `x` on uses. A tensor
that passes a segment by is counted in both `live`, though the segment neither makes nor uses it, and
`passing` takes that back: only pairs of starts between which nothing uses a tensor from before have any.

A longer segment may have a smaller load (it cuts elsewhere), so what a partition can reach is a set, not an
interval. For a limit, one pass over the starts of a partition gives the ends that it can reach: of the starts
that memory allows, the one with the largest `sums[a] - live[a]` decides, and a deque keeps it (a sliding
window maximum), then `passing` is looked at. Bisection over the limit gives the optimum. Before, intervals
with lower bounds of the loads narrow down what can be a start at all, so that balanced problems take a
small part of n * partitions steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from weft.partition.chain.links import Window
from weft.partition.chain.search import SLACK

PRECISION = 1e-10
"""Largest loads that differ by less than this share of them count as equal in the bisection."""


@dataclass(frozen=True)
class Memory:
    """The memory of segments: `fixed[b] - fixed[a] + held * (kept[b] - kept[a])`, up to `room`.

    Attributes:
        fixed: Sums over the links before: parameters, gradients, optimizer state.
        kept: Sums over the links before: activations of one microbatch.
        held: For each partition how many microbatches it holds.
        room: For each partition what its base load leaves of its limit.
    """

    fixed: Sequence[float]
    kept: Sequence[float]
    held: Sequence[int]
    room: Sequence[float]

    def before(self, partition: int, start: int) -> float:
        """The memory that all links before `start` would take on `partition`."""
        return self.fixed[start] + self.held[partition] * self.kept[start]

    def farthest(self, partition: int, start: int) -> int:
        """Where a segment from `start` ends at most."""
        most = self.before(partition, start) + self.room[partition]
        return bisect_right(range(len(self.fixed)), most, key=lambda b: self.before(partition, b)) - 1

    def earliest(self, partition: int, end: int) -> int:
        """Where a segment up to `end` starts at least."""
        least = self.before(partition, end) - self.room[partition]
        return bisect_left(range(len(self.fixed)), least, key=lambda a: self.before(partition, a))


@dataclass(frozen=True)
class Bounded:
    """A chain and what is asked of its segments.

    Attributes:
        sums: For each partition the costs of the links before each start.
        floors: The same without what may be taken back: they never fall, and no load is below.
        base: The base load of each partition.
        floor_base: The part of it that is never taken back.
        live: For each start what a cut there costs either side.
        sure: The part of it that is never taken back.
        passing: End to start to what is taken back.
        memory: None if nothing is limited.
        required: For each partition whether it must get a link.
        windows: For each partition, and one past the last, the first and last start that is allowed.
    """

    sums: Sequence[Sequence[float]]
    floors: Sequence[Sequence[float]]
    base: Sequence[float]
    floor_base: Sequence[float]
    live: Sequence[float]
    sure: Sequence[float]
    passing: Mapping[int, Mapping[int, float]]
    memory: Memory | None
    required: Sequence[bool]
    windows: Sequence[Window]

    @cached_property
    def _n(self) -> int:
        return len(self.live) - 1

    @cached_property
    def _fastest(self) -> Sequence[float]:
        return min(self.floors, key=lambda floor: floor[-1])

    @cached_property
    def _sides(self) -> dict[int, tuple[list[float], list[float]]]:
        """For each of the different `sums` what a start there takes off a load, and what an end there adds."""
        different = {id(sums): sums for sums in self.sums}
        return {
            key: (
                [value - live for value, live in zip(sums, self.live, strict=True)],
                [value + live for value, live in zip(sums, self.live, strict=True)],
            )
            for key, sums in different.items()
        }

    @cached_property
    def lower(self) -> float:
        """No cut has a smaller largest load."""
        floor, sure = self._fastest, self.sure
        before = accumulate((floor[a] - sure[a] for a in range(self._n)), max)
        after = list(accumulate((floor[b] + sure[b] for b in range(self._n, 0, -1)), min))[::-1]
        link = max((b - a for a, b in zip(before, after, strict=True)), default=0.0)
        return max(link, (floor[-1] + sum(self.floor_base)) / len(self.base), *self.floor_base)

    @cached_property
    def _cuts(self) -> list[float]:
        """For each partition what its cuts cost at least."""
        least = min(self.sure[1:-1], default=0.0)
        return [
            least * (any(self.required[:p]) + any(self.required[p + 1 :])) if required else 0.0
            for p, required in enumerate(self.required)
        ]

    def load(self, partition: int, start: int, end: int) -> float:
        """The cost of a segment on a partition."""
        if start == end:
            return self.base[partition]
        sums = self.sums[partition]
        back = self.passing[end].get(start, 0.0) if end in self.passing else 0.0
        return self.base[partition] + sums[end] - sums[start] + self.live[start] + self.live[end] - back

    def fits(self, limit: float) -> bool:
        """True if some cut has no load above `limit`."""
        return self._reach(limit) is not None

    def bottleneck(self, below: float = math.inf) -> float:
        """The smallest possible largest load; infinity if that is more than `below`, or there is no cut."""
        low = self.lower
        if low > below:
            return math.inf
        if self.fits(low * SLACK):
            return low
        top = min(below, self._top)
        high, gap = low, (low or top) / 1024.0
        while not self.fits(high):
            if high >= top:
                return math.inf
            low, high, gap = high, min(high + gap, top), 2.0 * gap
        while high - low > PRECISION * high:
            middle = (low + high) / 2.0
            if self.fits(middle):
                high = middle
            else:
                low = middle
        starts = self.best(high * SLACK)
        return max(self.load(p, starts[p], starts[p + 1]) for p in range(len(self.base)))

    def best(self, limit: float, effort: int = 0) -> list[int]:
        """The starts of a cut without a load above `limit`; there must be one (`fits`).

        From the last partition to the first, each gets as near as can be to what it would have if those
        up to it shared evenly, by their speeds, what is left.
        """
        reach = self._reach(limit)
        assert reach is not None
        speeds = list(
            accumulate((1.0 / floor[-1] if floor[-1] else 1.0 for floor in self.floors), initial=0.0)
        )
        starts = [self._n]
        for partition in reversed(range(len(self.base))):
            end = starts[0]
            wanted = self._fastest[end] * speeds[partition] / speeds[partition + 1]
            near = bisect_left(self._fastest, wanted)
            starts.insert(0, self._nearest(partition, reach[partition], near, end, limit))
        return starts

    @cached_property
    def _top(self) -> float:
        """No largest load is above this."""
        total = max(max(sums) - min(sums) for sums in self.sums)
        return (max(self.base) + total + 2.0 * max(self.live)) * SLACK

    def _nearest(self, partition: int, starts: Sequence[int], wanted: int, end: int, limit: float) -> int:
        """The start near `wanted` from which `partition` can reach `end`."""
        after = bisect_left(starts, wanted)
        before = after - 1
        while before >= 0 or after < len(starts):
            left = wanted - starts[before] if before >= 0 else math.inf
            right = starts[after] - wanted if after < len(starts) else math.inf
            start = starts[before] if left <= right else starts[after]
            before, after = (before - 1, after) if left <= right else (before, after + 1)
            if self._allowed(partition, start, end) and self.load(partition, start, end) <= limit * SLACK:
                return start
        raise AssertionError("a start that was reached leads on")

    def _allowed(self, partition: int, start: int, end: int) -> bool:
        if start >= end:
            return start == end and not self.required[partition]
        memory = self.memory
        return memory is None or (
            memory.before(partition, end) - memory.before(partition, start) <= memory.room[partition]
        )

    def _reach(self, limit: float) -> list[list[int]] | None:
        """For each partition, and one past the last, the starts that can be reached; None if no end can."""
        windows = self._narrowed(limit)
        if windows is None:
            return None
        reached = [[0]]
        for partition in range(len(self.base)):
            ends = self._ends(partition, reached[-1], windows[partition + 1], limit)
            if not ends:
                return None
            reached.append(ends)
        return reached

    def _ends(self, partition: int, starts: Sequence[int], window: Window, limit: float) -> list[int]:
        """The ends inside `window` that `partition` can reach from any of `starts`."""
        enter, leave = self._sides[id(self.sums[partition])]
        memory, passing = self.memory, self.passing
        room = limit - self.base[partition]
        space = math.inf if memory is None else memory.room[partition]
        empty = set() if self.required[partition] or room < 0.0 or space < 0.0 else set(starts)
        best: deque[int] = deque()
        ends, taken, count = [], 0, len(starts)
        for end in range(window[0], window[1] + 1):
            while taken < count and starts[taken] < end:
                start = starts[taken]
                value = enter[start]
                while best and enter[best[-1]] <= value:
                    best.pop()
                best.append(start)
                taken += 1
            if space < math.inf and memory is not None:
                least = memory.before(partition, end) - space
                while best and memory.before(partition, best[0]) < least:
                    best.popleft()
            if (
                (best and leave[end] - enter[best[0]] <= room)
                or end in empty
                or (end in passing and self._passes(partition, starts, end, limit))
            ):
                ends.append(end)
        return ends

    def _passes(self, partition: int, starts: Sequence[int], end: int, limit: float) -> bool:
        """True if `end` can be reached once what is taken back is counted."""
        for start in self.passing[end]:
            place = bisect_left(starts, start)
            if place < len(starts) and starts[place] == start and self._allowed(partition, start, end):
                if self.load(partition, start, end) <= limit:
                    return True
        return False

    def _narrowed(self, limit: float) -> list[Window] | None:
        """Intervals outside of which no start can be, by the lower bounds of the loads; None if one is empty."""
        windows: list[Window] = [(0, 0)]
        first = last = 0
        rooms = [
            (limit * SLACK - base - cuts) for base, cuts in zip(self.floor_base, self._cuts, strict=True)
        ]
        for partition, (room, floor) in enumerate(zip(rooms, self.floors, strict=True)):
            low, high = self.windows[partition + 1]
            last = min(high, bisect_right(floor, floor[last] + room) - 1, self._farthest(partition, last))
            first = max(low, first + self.required[partition])
            if first > last:
                return None
            windows.append((first, last))
        first = last = self._n
        if windows[-1] != (first, last) and windows[-1][1] < last:
            return None
        windows[-1] = (first, last)
        for partition in reversed(range(len(rooms))):
            floor, (low, high) = self.floors[partition], windows[partition]
            first = max(low, bisect_left(floor, floor[first] - rooms[partition]))
            if self.memory is not None and self.memory.room[partition] < math.inf:
                first = max(first, self.memory.earliest(partition, windows[partition + 1][0]))
            last = min(high, last - self.required[partition])
            if first > last:
                return None
            windows[partition] = (first, last)
        return windows

    def _farthest(self, partition: int, start: int) -> int:
        if self.memory is None or self.memory.room[partition] == math.inf:
            return self._n
        return self.memory.farthest(partition, start)
