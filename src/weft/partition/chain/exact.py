"""The placement whose largest cost is as small as it can be, over units in program order.

Without transfers, limits and differences between devices `chain.split` finds it. Otherwise `bounded` does,
and this module counts what it needs: what links cost on each device, and what tensors cost at each cut.
Spread groups are base loads in both; a tensor between one of them (on partition q) and a link x makes x dearer
everywhere but on q, makes q dearer, and takes that back if q has x.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from weft.errors import PlacementError
from weft.partition.chain.bounded import Bounded, Memory
from weft.partition.chain.chain import EFFORT, crossings, search_chain, shares_before
from weft.partition.chain.links import Chain, Choice, Link
from weft.partition.chain.search import COMBINATIONS, SLACK, Search
from weft.partition.placement import Placement
from weft.partition.problem import Problem


def exact(problem: Problem) -> Placement:
    """The best placement with one segment a partition.

    A partition stays empty only where nothing else is possible. Among equally good placements plain problems
    (no transfer, no memory limit, equal devices) are ordered as `chain.split` says; others take the
    choice for spread groups with the fewest crossings, then the smallest sum of squared costs, and inside it
    an even cut. The result is the optimum unless there are more than `search.COMBINATIONS` choices.

    Raises:
        PlacementError: If no placement keeps within the memory limits.
    """
    counted = Counted(problem, problem.chain)
    if counted.plain:
        costs = counted.unit_costs(problem.devices[0].speed)
        search = search_chain(costs, counted.chain)
        found = search.run(EFFORT)
        assert found is not None
    else:
        search = counted.search({})
        found = search.run(EFFORT)
        if found is None:
            raise PlacementError(_too_large(counted))
        passing = counted.passing(found[1])
        if passing:
            search = counted.search(passing)
            found = search.run(EFFORT, below=found[1] * SLACK) or found
    partitions, _ = found
    placement = Placement(problem, tuple(partitions))
    return placement.with_bound(placement.largest_cost if search.complete else counted.lower)


class Flow(NamedTuple):
    """A tensor of the chain, with links as numbers: its source, its targets ascending, its cost at either end."""

    source: int
    targets: tuple[int, ...]
    cost: float


@dataclass(frozen=True)
class Counted:
    """A problem in the terms of its chain."""

    problem: Problem
    chain: Chain

    @property
    def plain(self) -> bool:
        """True if all partitions are alike, and nothing but what units cost counts."""
        problem = self.problem
        speeds = {device.speed for device in problem.devices}
        return problem.transfer_s is None and not problem.limited and len(speeds) == 1

    def unit_costs(self, speed: float) -> list[float]:
        """The cost of each unit on a device of that speed."""
        return [memory + time / speed for memory, time in zip(*self.problem.shares, strict=True)]

    @cached_property
    def costs(self) -> dict[float, tuple[list[float], list[float]]]:
        """Speed to the costs of the chain's links and of the spread ones."""
        result = {}
        for speed in {device.speed for device in self.problem.devices}:
            costs = self.unit_costs(speed)
            result[speed] = (
                [link.sum(costs) for link in self.chain.chain],
                [link.sum(costs) for link in self.chain.spread],
            )
        return result

    @cached_property
    def floors(self) -> dict[float, list[float]]:
        """Speed to the costs of the links before each start."""
        return {speed: _sums(links) for speed, (links, _) in self.costs.items()}

    @cached_property
    def lower(self) -> float:
        """A bound that needs no search: the mean load and the largest link, on the fastest device."""
        links, spread = self.costs[max(device.speed for device in self.problem.devices)]
        return max([(sum(links) + sum(spread)) / self.problem.partitions, *links, *spread], default=0.0)

    @cached_property
    def _flows(self) -> tuple[list[Flow], list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        """Tensors of the chain, (spread group, link, cost), and (spread group, spread group, cost)."""
        flows: list[Flow] = []
        mixed: list[tuple[int, int, float]] = []
        apart: list[tuple[int, int, float]] = []
        if self.problem.transfer_s is None:
            return flows, mixed, apart
        place = {unit: number for number, link in enumerate(self.chain.chain) for unit in link.units}
        group = {unit: number for number, link in enumerate(self.chain.spread) for unit in link.units}
        for source, targets, size in self.problem.graph.flows:
            cost = self.problem.transfer_ms(size) * self.problem.cost_of_ms
            for target in targets:
                if source in group and target in group:
                    apart.append((group[source], group[target], cost))
                elif source in group:
                    mixed.append((group[source], place[target], cost))
                elif target in group:
                    mixed.append((group[target], place[source], cost))
            if source in place:
                links = sorted({place[target] for target in targets if target in place} - {place[source]})
                if links:
                    flows.append(Flow(place[source], tuple(links), cost))
        return flows, mixed, apart

    @cached_property
    def live(self) -> list[float]:
        """For each start what the tensors cost that are made before it and used from it on."""
        change = [0.0] * (len(self.chain.chain) + 2)
        for flow in self._flows[0]:
            change[flow.source + 1] += flow.cost
            change[flow.targets[-1] + 1] -= flow.cost
        return [max(0.0, value) for value in itertools.accumulate(change[:-1])]

    @cached_property
    def sure(self) -> list[float]:
        """The part of `live` that goes from the link before the start to the link after it."""
        result = [0.0] * (len(self.chain.chain) + 1)
        for flow in self._flows[0]:
            if flow.targets[0] == flow.source + 1:
                result[flow.source + 1] += flow.cost
        return result

    def passing(self, high: float) -> dict[int, dict[int, float]]:
        """End to start to the cost of tensors that pass by, where a load could come down to `high` by it."""
        flows = [flow for flow in self._flows[0] if flow.targets[-1] > flow.source + 1]
        result: dict[int, dict[int, float]] = {}
        if not flows:
            return result
        speeds = sorted(self.floors)
        slow, fast = self.floors[speeds[0]], self.floors[speeds[-1]]
        bases = sum(self.costs[speeds[0]][1]) + 2.0 * sum(cost for _, _, cost in self._flows[1])
        least = self.lower - 2.0 * max(self.live) - bases
        by_source = sorted(flows)
        active: list[Flow] = []
        taken = 0
        for start in range(1, len(self.chain.chain)):
            while taken < len(by_source) and by_source[taken].source < start:
                active.append(by_source[taken])
                taken += 1
            active = [flow for flow in active if flow.targets[-1] > start]
            if not active:
                continue
            first = max(start + 1, bisect_left(slow, slow[start] + least))
            last = min(bisect_right(fast, fast[start] + high) - 1, max(flow.targets[-1] for flow in active))
            for end in range(first, last + 1):
                back = sum(flow.cost * _times(flow, start, end) for flow in active)
                if back:
                    result.setdefault(end, {})[start] = back
        return result

    def search(self, passing: Mapping[int, Mapping[int, float]]) -> Search:
        """The search over the choices for spread groups."""
        costs = self.unit_costs(1.0)

        def rank(placement: Sequence[int]) -> tuple[int, float, list[int]]:
            squares = sum(load.cost**2 for load in Placement(self.problem, tuple(placement)).loads)
            return crossings(placement), squares, list(placement)

        def cutter(choice: Choice, full: bool) -> Bounded:
            return self._cutter(choice, full, passing)

        return Search(self.chain, cutter, rank, lambda: shares_before(costs, self.chain))

    def _cutter(self, choice: Choice, full: bool, passing: Mapping[int, Mapping[int, float]]) -> Bounded:
        devices, count = self.problem.devices, self.problem.partitions
        floor_base = [0.0] * count
        for number, partition in enumerate(choice):
            floor_base[partition] += self.costs[devices[partition].speed][1][number]
        floors = [self.floors[device.speed] for device in devices]
        base, sums = self._mixed(choice, list(floor_base), floors)
        return Bounded(
            sums=sums,
            floors=floors,
            base=base,
            floor_base=floor_base,
            live=self.live,
            sure=self.sure,
            passing=passing,
            memory=self._memory(choice),
            required=[full and partition not in choice for partition in range(count)],
            windows=self.chain.windows,
        )

    def _mixed(
        self, choice: Choice, base: list[float], floors: list[list[float]]
    ) -> tuple[list[float], Sequence[Sequence[float]]]:
        """Base loads and sums with the tensors between spread groups and others."""
        _, mixed, apart = self._flows
        for one, other, cost in apart:
            if choice[one] != choice[other]:
                base[choice[one]] += cost
                base[choice[other]] += cost
        if not mixed:
            return base, floors
        away = [0.0] * len(self.chain.chain)
        home: dict[int, list[float]] = {}
        for group, link, cost in mixed:
            base[choice[group]] += cost
            away[link] += cost
            home.setdefault(choice[group], [0.0] * len(away))[link] += 2.0 * cost
        sums: list[list[float]] = []
        shared: dict[float, list[float]] = {}
        for partition, device in enumerate(self.problem.devices):
            links = self.costs[device.speed][0]
            if partition in home:
                back = home[partition]
                sums.append(_sums([a + b - c for a, b, c in zip(links, away, back, strict=True)]))
                continue
            if device.speed not in shared:
                shared[device.speed] = _sums([a + b for a, b in zip(links, away, strict=True)])
            sums.append(shared[device.speed])
        return base, sums

    def reached(self) -> int:
        """The number of links of the chain that the devices have room for, filled in program order."""
        most = 0
        for choice in itertools.islice(itertools.product(*self.chain.options), COMBINATIONS):
            memory = self._memory(choice)
            if memory is None:
                return len(self.chain.chain)
            start = 0
            for partition in range(self.problem.partitions):
                start = max(start, memory.farthest(partition, start))
            most = max(most, start)
        return most

    def _memory(self, choice: Choice) -> Memory | None:
        problem = self.problem
        if not problem.limited:
            return None
        room = [device.memory_bytes for device in problem.devices]
        for link, partition in zip(self.chain.spread, choice, strict=True):
            fixed, kept = memory_of(problem, link)
            room[partition] -= fixed + problem.in_flight[partition] * kept
        pairs = [memory_of(problem, link) for link in self.chain.chain]
        return Memory(
            _sums([fixed for fixed, _ in pairs]), _sums([kept for _, kept in pairs]), problem.in_flight, room
        )


def _sums(values: Sequence[Any]) -> list[Any]:
    return list(itertools.accumulate(values, initial=0))


def _times(flow: Flow, start: int, end: int) -> int:
    """The number of times that `live` counts a tensor too often for a segment."""
    if flow.source >= start or flow.targets[-1] < end:
        return 0
    following = bisect_left(flow.targets, start)
    return 1 + (flow.targets[following] >= end)


def memory_of(problem: Problem, link: Link) -> tuple[int, int]:
    """The memory of a link: for good, and for each microbatch."""
    units = [problem.graph.units[unit] for unit in link.units]
    fixed = problem.copies * sum(unit.parameter_bytes for unit in units)
    return fixed, sum(unit.activation_bytes for unit in units)


def _too_large(counted: Counted) -> str:
    """Why no placement keeps within the memory limits, and what to do."""
    problem, links = counted.problem, counted.chain.links
    held = min(problem.in_flight)
    sizes = [fixed + held * kept for fixed, kept in (memory_of(problem, link) for link in links)]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    most = max(device.memory_bytes for device in problem.devices)
    reached = counted.reached()
    if sizes[largest] > most:
        name = problem.graph.units[links[largest].units[0]].name
        why = f'"{name}" alone takes {sizes[largest]} bytes, the largest device has {most:.0f}'
    elif reached < len(counted.chain.chain):
        unit = counted.chain.chain[reached].units[0]
        why = f'filled in program order, the devices have no room from "{problem.graph.units[unit].name}" on'
    else:
        why = "fixed units and groups leave no room"
    return (
        f"no placement keeps within the memory limits: {why}; use more partitions, more memory, "
        "or fewer microbatches in flight"
    )
