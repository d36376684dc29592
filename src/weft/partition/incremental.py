"""A placement of which a few units are moved: what changes, without counting everything again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.partition.placement import Load, Placement, add_transfer, add_unit, ends
from weft.partition.problem import Problem


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
