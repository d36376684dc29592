"""Several segments a partition: looped and V-shaped placements, whose partitions are balanced as a whole.

Which cuts minimise the largest sum over the segments of a partition is a hard problem (the loads of all
partitions have to be carried along), so:

(1) The exact cut into partitions * chunks segments is where it starts: no segment is longer than it must be.
(2) Cuts are moved, one at a time, for as long as that makes the largest partition smaller (or, with the same
    largest one, the sum of squares).
(3) All cuts are searched depth first for a better one. A branch ends where a partition is as large as the
    best largest one, or where what is left cannot fit. It is given up after `NODES` steps; if it comes to
    its end, the placement is the optimum.

The guarantee is `Placement.bound`: no placement is below it. In the search transfers are counted
for each segment by itself; a tensor that a partition gets in two of its segments counts once in the result.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.errors import PlacementError
from weft.partition.chain.chain import EFFORT, shares_before
from weft.partition.chain.cut import Cut
from weft.partition.chain.exact import Counted, memory_of
from weft.partition.chain.links import Choice
from weft.partition.chain.search import SLACK
from weft.partition.placement import Placement
from weft.partition.problem import Problem

CHOICES = 64
"""Up to so many choices for the spread groups are all tried."""

NODES = 200_000
"""How many steps the search of (3) may take, over all choices."""

DEEPEST = 64
"""With more segments than this the search of (3) is left out."""

SWEEPS = 100

Key = tuple[float, float, float]
"""How cuts compare: bytes above the limits, largest cost, sum of squared costs."""


def chunked(problem: Problem) -> Placement:
    """A placement with `problem.chunks` segments a partition; the optimum where `Placement.optimal`.

    Raises:
        PlacementError: If no placement is found that keeps within the memory limits.
    """
    counted = Counted(problem, problem.chain)
    choices = _choices(counted)
    complete = len(choices) == math.prod(map(len, counted.chain.options))
    found = []
    for choice in choices:
        cuts = _Cuts(counted, choice)
        cuts.improve()
        proof = _Proof(cuts, NODES // len(choices))
        complete = proof.run() and complete
        found.append((cuts.key(), cuts))
    key, best = min(found, key=lambda pair: pair[0])
    if key[0] > 0.0:
        how = "there is no placement" if complete else "no placement was found"
        raise PlacementError(
            f"{how} with a unit in every segment that keeps within the memory limits (the best is "
            f"{key[0]:.0f} bytes above); use more partitions, more memory, fewer chunks, or fewer "
            "microbatches in flight"
        )
    placement = Placement(problem, tuple(best.segments()))
    known = complete and problem.transfer_s is None
    return placement.with_bound(placement.largest_cost if known else counted.lower)


def _choices(counted: Counted) -> list[Choice]:
    if math.prod(map(len, counted.chain.options)) <= CHOICES:
        return list(itertools.product(*counted.chain.options))
    return [tuple(shares_before(counted.unit_costs(1.0), counted.chain))]


@dataclass
class _Cuts:
    """Starts of the segments, and what they make of each partition."""

    counted: Counted
    choice: Choice
    starts: list[int] = field(init=False)
    costs: list[float] = field(init=False)
    memory: list[float] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.counted.problem
        self.owners = problem.owners
        self.n = len(self.counted.chain.chain)
        self.floors = [self.counted.floors[device.speed] for device in problem.devices]
        self.limits = [device.memory_bytes for device in problem.devices]
        pairs = [memory_of(problem, link) for link in self.counted.chain.chain]
        self.fixed = list(itertools.accumulate((fixed for fixed, _ in pairs), initial=0))
        self.kept = list(itertools.accumulate((kept for _, kept in pairs), initial=0))
        sides = [-1, *self.owners, -1]
        self.crosses = [one != other for one, other in itertools.pairwise(sides)]
        self.base = [0.0] * problem.partitions
        self.base_memory = [0.0] * problem.partitions
        for number, partition in enumerate(self.choice):
            speed = problem.devices[partition].speed
            self.base[partition] += self.counted.costs[speed][1][number]
            fixed, kept = memory_of(problem, self.counted.chain.spread[number])
            held = max(h for h, p in zip(problem.in_flight, self.owners, strict=True) if p == partition)
            self.base_memory[partition] += fixed + held * kept
        self.use(self._even())

    def use(self, starts: list[int]) -> None:
        """Take over a cut."""
        self.starts = starts
        self.costs, self.memory = list(self.base), list(self.base_memory)
        for segment, (start, end) in enumerate(itertools.pairwise(starts)):
            self.costs[self.owners[segment]] += self.cost(segment, start, end)
            self.memory[self.owners[segment]] += self.bytes(segment, start, end)

    def _even(self) -> list[int]:
        """(1)"""
        count, n = len(self.owners), self.n
        if n < count:
            return [min(number, n) for number in range(count)] + [n]
        links = self.counted.chain.chain
        costs = self.counted.costs[max(self.counted.costs)][0]
        windows = [(0, 0), *[(0, n)] * (count - 1), (n, n)]
        cut = Cut(costs, [0.0] * count, [True] * count, windows, [True] * len(links), [])
        return cut.best(cut.bottleneck() * SLACK, EFFORT)

    def cost(self, segment: int, start: int, end: int) -> float:
        """The cost of a segment on its partition."""
        if start == end:
            return 0.0
        floor, live = self.floors[self.owners[segment]], self.counted.live
        before = live[start] if self.crosses[segment] else 0.0
        after = live[end] if self.crosses[segment + 1] else 0.0
        return floor[end] - floor[start] + before + after

    def bytes(self, segment: int, start: int, end: int) -> float:
        """The memory of a segment."""
        held = self.counted.problem.in_flight[segment]
        return self.fixed[end] - self.fixed[start] + held * (self.kept[end] - self.kept[start])

    def key(self) -> Key:
        """The key by which cuts are compared: the smaller the better."""
        excess = sum(max(0.0, m - limit) for m, limit in zip(self.memory, self.limits, strict=True))
        return excess, max(self.costs), sum(cost * cost for cost in self.costs)

    def improve(self) -> None:
        """(2)"""
        for _ in range(SWEEPS):
            moved = False
            for number in range(1, len(self.owners)):
                moved = self._move(number) or moved
            if not moved:
                return

    def _move(self, number: int) -> bool:
        """The best place for one start; whether it is another one."""
        key = self.key()
        first, last = self.starts[number - 1], self.starts[number + 1]
        empty = self.n < len(self.owners)
        sides = {self.owners[number - 1], self.owners[number]}
        largest = heapq.nlargest(3, range(len(self.costs)), key=self.costs.__getitem__)
        others = max((self.costs[p] for p in largest if p not in sides), default=0.0)
        best: tuple[Key, int, dict[int, tuple[float, float]]] | None = None
        for start in _steps(self.starts[number], first + (not empty), last - (not empty)):
            changed = self._changed(number, start)
            squares, excess = key[2], key[0]
            for partition, (cost, memory) in changed.items():
                squares += cost**2 - self.costs[partition] ** 2
                limit = self.limits[partition]
                excess += max(0.0, memory - limit) - max(0.0, self.memory[partition] - limit)
            largest_cost = max(others, *(cost for cost, _ in changed.values()))
            candidate = (excess, largest_cost, squares)
            if _better(candidate, key if best is None else best[0]):
                best = (candidate, start, changed)
        if best is None:
            return False
        self.starts[number] = best[1]
        for partition, (cost, memory) in best[2].items():
            self.costs[partition], self.memory[partition] = cost, memory
        return True

    def _changed(self, number: int, start: int) -> dict[int, tuple[float, float]]:
        """(cost, memory) of the partitions on both sides of a start, were it at `start`."""
        result: dict[int, tuple[float, float]] = {}
        for segment, old, new in (
            (number - 1, (self.starts[number - 1], self.starts[number]), (self.starts[number - 1], start)),
            (number, (self.starts[number], self.starts[number + 1]), (start, self.starts[number + 1])),
        ):
            owner = self.owners[segment]
            cost, memory = result.get(owner, (self.costs[owner], self.memory[owner]))
            result[owner] = (
                cost + self.cost(segment, *new) - self.cost(segment, *old),
                memory + self.bytes(segment, *new) - self.bytes(segment, *old),
            )
        return result

    def segments(self) -> Iterator[int]:
        """The segment of every unit; a spread group's unit is in the chunk that the program has reached."""
        count = self.counted.problem.partitions
        result: dict[int, int] = {}
        for segment, (start, end) in enumerate(itertools.pairwise(self.starts)):
            for link in self.counted.chain.chain[start:end]:
                result.update(dict.fromkeys(link.units, segment))
        home = {
            unit: partition
            for link, partition in zip(self.counted.chain.spread, self.choice, strict=True)
            for unit in link.units
        }
        reached = 0
        for unit in range(self.counted.chain.units):
            if unit in home:
                chunk = range(reached * count, (reached + 1) * count)
                yield next(segment for segment in chunk if self.owners[segment] == home[unit])
            else:
                reached = result[unit] // count
                yield result[unit]


def _better(one: Key, other: Key) -> bool:
    """True if `one` is smaller by more than rounding."""
    for a, b in zip(one, other, strict=True):
        if a < b - 1e-9 * abs(b):
            return True
        if a > b + 1e-9 * abs(b):
            return False
    return False


def _steps(start: int, first: int, last: int) -> Iterator[int]:
    """Places around `start`, ever farther away."""
    step = 1
    while start - step >= first or start + step <= last:
        if start - step >= first:
            yield start - step
        if start + step <= last:
            yield start + step
        step *= 2


class _Proof:
    """(3)"""

    def __init__(self, cuts: _Cuts, nodes: int) -> None:
        self.cuts = cuts
        self.nodes = nodes
        self.costs, self.memory = list(cuts.base), list(cuts.base_memory)
        excess, largest, _ = cuts.key()
        self.best = math.inf if excess > 0.0 else largest / SLACK
        self.fastest = cuts.floors[min(range(len(cuts.floors)), key=lambda p: cuts.floors[p][-1])]
        self.empty = cuts.n < len(cuts.owners)

    def run(self) -> bool:
        """Search; whether all was searched. A better cut is put into `cuts`."""
        if len(self.cuts.owners) > DEEPEST:
            return False
        self._descend([0])
        return self.nodes > 0

    def _descend(self, starts: list[int]) -> None:
        cuts, segment, start = self.cuts, len(starts) - 1, starts[-1]
        left = len(cuts.owners) - segment - 1
        if left < 0:
            self.cuts.use(list(starts))
            self.best = cuts.key()[1] / SLACK
            return
        owner = cuts.owners[segment]
        cost, memory = self.costs[owner], self.memory[owner]
        first = cuts.n if not left else start + (not self.empty)
        for end in range(first, cuts.n - (0 if self.empty else left) + 1):
            self.nodes -= 1
            if self.nodes <= 0:
                break
            added = cuts.bytes(segment, start, end)
            floor = cuts.floors[owner]
            if memory + added > cuts.limits[owner] or cost + floor[end] - floor[start] >= self.best:
                break
            self.costs[owner], self.memory[owner] = cost + cuts.cost(segment, start, end), memory + added
            room = sum(self.best - other for other in self.costs)
            if self.costs[owner] < self.best and room >= self.fastest[-1] - self.fastest[end]:
                self._descend([*starts, end])
        self.costs[owner], self.memory[owner] = cost, memory
