"""A placement and what it costs: the definition that all algorithms answer to.

The time of a partition, for one microbatch, is

    time of its units / speed of its device  +  transfers

A tensor that crosses counts once for the partition that sends it and once for each partition that gets
it: a tensor goes to the same place once. Each time it counts 2 * transfer time of its bytes: its value
goes one way, its gradient the other. A tensor between a unit of a spread group (a tied embedding and head)
and another unit counts for that pair by itself.

    memory = copies * parameter bytes  +  microbatches in flight * activation bytes
    cost   = memory share of its units  +  time share of (units / speed + transfers)

The shares are those of `cost`, with the mean number of microbatches in flight. `Mover` moves a few units without
counting everything again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.errors import PlacementError
from weft.graph.model import Flow, Unit
from weft.partition.problem import Problem


@dataclass
class Load:
    """The work and memory of a partition.

    Attributes:
        compute_ms: Forward and backward time of its units on its device, for one microbatch.
        transfer_ms: What it sends and receives, for one microbatch.
        parameter_bytes: Its parameters, once.
        activation_bytes: What it keeps for the backward pass, for one microbatch.
        memory_bytes: Parameters, gradients, optimizer state and activations in flight.
        cost: What is balanced; all units on one device of speed 1 cost 1.
    """

    compute_ms: float = 0.0
    transfer_ms: float = 0.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    memory_bytes: int = 0
    cost: float = 0.0

    @property
    def time_ms(self) -> float:
        """Computing and transfers."""
        return self.compute_ms + self.transfer_ms


@dataclass(frozen=True)
class Placement:
    """Where each unit goes.

    Attributes:
        problem: What was asked.
        segments: The segment of each unit; with one chunk that is its partition.
        bound: No placement of this kind has a largest cost below this, as far as the algorithm knows.

    >>> from weft.graph import Graph, Unit
    >>> graph = Graph([Unit("a", 1, 2, 400, 8, 64), Unit("b", 1, 1, 0, 8), Unit("c", 2, 4, 0, 8)])
    >>> placement = Placement(Problem(graph, 2, transfer_s=lambda size: size / 128e3), (0, 1, 1))
    >>> [load.time_ms for load in placement.loads]
    [4.0, 9.0]
    """

    problem: Problem
    segments: tuple[int, ...]
    bound: float = 0.0

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partition of each unit."""
        owners = self.problem.owners
        if self.problem.chunks == 1:
            return self.segments
        return tuple(owners[segment] for segment in self.segments)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """The work and memory of each partition."""
        problem, owners, at = self.problem, self.problem.owners, self.partitions
        loads = [Load() for _ in range(problem.partitions)]
        for unit, segment in enumerate(self.segments):
            add_unit(loads[owners[segment]], problem, unit, segment)
        if problem.transfer_s is not None:
            spread = problem.spread_units
            for flow in problem.graph.flows:
                for partition in ends(flow, at, spread):
                    add_transfer(loads[partition], problem, flow[2])
        return tuple(loads)

    @property
    def largest_ms(self) -> float:
        """The time of the slowest partition, for one microbatch."""
        return max(load.time_ms for load in self.loads)

    @property
    def largest_cost(self) -> float:
        """The largest cost of a partition: what is minimised."""
        return max(load.cost for load in self.loads)

    @property
    def optimal(self) -> bool:
        """True if the largest cost is known to be the least possible one."""
        return self.largest_cost <= self.bound * (1.0 + 1e-9)

    @cached_property
    def excess_bytes(self) -> float:
        """By how much memory limits are broken, over all partitions."""
        pairs = zip(self.loads, self.problem.devices, strict=True)
        return sum(max(0.0, load.memory_bytes - device.memory_bytes) for load, device in pairs)

    def units_of(self, partition: int) -> tuple[Unit, ...]:
        """The units of a partition, in program order."""
        pairs = zip(self.problem.graph, self.partitions, strict=True)
        return tuple(unit for unit, owner in pairs if owner == partition)

    def with_bound(self, bound: float) -> Placement:
        """The same placement with another bound."""
        result = replace(self, bound=bound)
        result.__dict__["loads"] = self.loads  # what the cached property would count
        return result

    def check(self) -> Placement:
        """The placement itself; raises if it breaks a memory limit, a group, or `fixed`."""
        graph, partitions = self.problem.graph, self.partitions
        faults = [
            f"partition {index} would take {load.memory_bytes} bytes, its device has {device.memory_bytes:.0f}"
            for index, (load, device) in enumerate(zip(self.loads, self.problem.devices, strict=True))
            if load.memory_bytes > device.memory_bytes
        ]
        faults += [
            f'the units of group "{name}" are on the partitions '
            f"{', '.join(map(str, sorted({partitions[unit] for unit in units})))}"
            for name, units in graph.groups.items()
            if len({partitions[unit] for unit in units}) > 1
        ]
        faults += [
            f'"{graph.units[unit].name}" is on partition {partitions[unit]}, fixed puts it on {wanted}'
            for unit, wanted in self.problem.fixed_units.items()
            if partitions[unit] != wanted
        ]
        if faults:
            raise PlacementError("; ".join(faults))
        return self


def add_unit(load: Load, problem: Problem, unit: int, segment: int, sign: int = 1) -> None:
    """Count a unit in `segment`; take it back with `sign` -1."""
    costs, (memory_shares, time_shares) = problem.graph.units[unit], problem.shares
    speed = problem.devices[problem.owners[segment]].speed
    held = problem.in_flight[segment] * costs.activation_bytes
    load.compute_ms += sign * costs.time_ms / speed
    load.parameter_bytes += sign * costs.parameter_bytes
    load.activation_bytes += sign * costs.activation_bytes
    load.memory_bytes += sign * (problem.copies * costs.parameter_bytes + held)
    load.cost += sign * (memory_shares[unit] + time_shares[unit] / speed)


def add_transfer(load: Load, problem: Problem, size: int, sign: int = 1) -> None:
    """Count one end of a tensor that crosses; take it back with `sign` -1."""
    cost = sign * problem.transfer_ms(size)
    load.transfer_ms += cost
    load.cost += cost * problem.cost_of_ms


def ends(flow: Flow, at: Sequence[int], spread: Collection[int]) -> Iterator[int]:
    """The partitions for which a tensor counts, once for each time; `at`: the partition of each unit."""
    source, targets, _ = flow
    home = at[source]
    elsewhere = {at[target] for target in targets if target not in spread} - {home}
    if source not in spread and elsewhere:
        yield home
        yield from sorted(elsewhere)
    for target in targets:
        if (source in spread or target in spread) and at[target] != home:
            yield home
            yield at[target]


def step_ms(largest_ms: float, partitions: int, microbatches: int) -> float:
    """An estimate of the step: the pipeline moves on by one microbatch each `largest_ms`.

    >>> step_ms(3.0, partitions=4, microbatches=8)
    33.0
    """
    return (microbatches + partitions - 1) * largest_ms


class Mover:
    """A problem, prepared for many placements that differ little.

    >>> from weft.graph import Graph, Unit
    >>> problem = Problem(Graph(Unit(name, 1.0, 2.0, 0, 0) for name in "abc"), partitions=2)
    >>> moved = Mover(problem).move(Placement(problem, (0, 1, 1)), [1], segment=0)
    >>> moved.partitions, [load.time_ms for load in moved.loads]
    ((0, 0, 1), [6.0, 3.0])
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._tensors: list[list[int]] = [[] for _ in problem.graph]
        if problem.transfer_s is not None:
            for number, (source, targets, _) in enumerate(problem.graph.flows):
                for unit in (source, *targets):
                    self._tensors[unit].append(number)

    def move(self, placement: Placement, units: Sequence[int], segment: int) -> Placement:
        """`placement` with `units` in `segment`; its loads are counted already."""
        problem, owners = self.problem, self.problem.owners
        segments = list(placement.segments)
        at = segments if problem.chunks == 1 else list(placement.partitions)
        changed: dict[int, Load] = {}

        def load(partition: int) -> Load:
            if partition not in changed:
                changed[partition] = replace(placement.loads[partition])
            return changed[partition]

        touched = sorted({number for unit in units for number in self._tensors[unit]})
        for sign in (-1, 1):
            for unit in units:
                if sign > 0:
                    segments[unit], at[unit] = segment, owners[segment]
                add_unit(load(at[unit]), problem, unit, segments[unit], sign)
            for number in touched:
                flow = problem.graph.flows[number]
                for partition in ends(flow, at, problem.spread_units):
                    add_transfer(load(partition), problem, flow[2], sign)
        result = Placement(problem, tuple(segments), placement.bound)
        loads = tuple(changed.get(partition, old) for partition, old in enumerate(placement.loads))
        result.__dict__["loads"] = loads  # what the cached property would count
        return result
