"""The tree algorithm of SageMaker's model parallelism, for comparison.

Karakus et al., "Amazon SageMaker Model Parallelism: A General and Flexible Framework for Large Model
Training", arXiv 2111.05972. Modules are a tree; a unit's name is its path: `blocks.3.mlp` lies in `blocks.3`,
which lies in `blocks`. A node costs

    alpha * memory + (1 - alpha) * time          alpha = memory_weight

with all that is below it. From the root down, for a list of siblings and the devices D that they got:

(1) One device takes them all.
(2) A sibling alone with several devices: a leaf takes the first of them, any other node hands them on to its
    children.
(3) Several siblings are cut, in program order, into as many segments as there are devices (or siblings), so
    that the largest segment costs as little as possible.
(4) The devices go to the segments by D'Hondt's method: one at a time, to the segment with the largest cost /
    (devices that it has + 1). A segment that gets none goes to the first of D. Each goes on at (1).

It knows neither transfers nor limits nor differences between devices, and a node is opened only if it gets
several devices. This is how weft reads the paper. Where it differs: units of one group go where the first of
them goes, which has the cost of all, and `fixed` is not possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.errors import PlacementError
from weft.partition.chain.chain import split
from weft.partition.chain.exact import Counted
from weft.partition.placement import Placement
from weft.partition.problem import Problem


@dataclass
class _Node:
    cost: float = 0.0
    units: list[int] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def tree(problem: Problem) -> Placement:
    """The placement that the tree algorithm finds; limits are not looked at.

    >>> from weft.graph import Graph, Unit
    >>> names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    >>> tree(Problem(Graph(Unit(name, 1.0, 2.0, 0, 0) for name in names), partitions=2)).partitions
    (0, 0, 0, 1, 1, 0)

    Raises:
        PlacementError: If chunks or `fixed` are asked for.
    """
    for name, found in (("chunks", problem.chunks > 1), ("fixed", bool(problem.fixed))):
        if found:
            raise PlacementError(f'the algorithm "tree" has no {name}: leave {name} out, or take "exact"')
    placed = [0] * len(problem.graph)
    _place([_tree(problem)], range(problem.partitions), placed)
    for units in problem.graph.groups.values():
        for unit in units:
            placed[unit] = placed[units[0]]
    return Placement(problem, tuple(placed), bound=Counted(problem, problem.chain).lower)


def _tree(problem: Problem) -> _Node:
    """The root; a unit that stands for a group has the group's cost."""
    costs = [memory + time for memory, time in zip(*problem.shares, strict=True)]
    for units in problem.graph.groups.values():
        costs[units[0]] = sum(costs[unit] for unit in units)
    others = {unit for units in problem.graph.groups.values() for unit in units[1:]}
    root = _Node()
    for index, unit in enumerate(problem.graph):
        if index in others:
            continue
        node = root
        for part in (*unit.name.split("."), ""):  # the last one is the unit itself: others may lie below it
            node.cost += costs[index]
            node.units.append(index)
            node = node.children.setdefault(part, _Node())
        node.cost, node.units = costs[index], [index]
    return root


def _place(nodes: Sequence[_Node], devices: Sequence[int], placed: list[int]) -> None:
    if len(devices) == 1 or (len(nodes) == 1 and not nodes[0].children):
        for node in nodes:  # (1), and leaves of (2)
            for unit in node.units:
                placed[unit] = devices[0]
        return
    if len(nodes) == 1:  # (2)
        _place(list(nodes[0].children.values()), devices, placed)
        return
    count = min(len(devices), len(nodes))
    at = split([node.cost for node in nodes], count)  # (3)
    segments = [[node for node, s in zip(nodes, at, strict=True) if s == number] for number in range(count)]
    seats = dhondt([sum(node.cost for node in segment) for segment in segments], len(devices))
    used = 0
    for segment, size in zip(segments, seats, strict=True):  # (4)
        _place(segment, devices[used : used + size] if size else devices[:1], placed)
        used += size


def dhondt(votes: Sequence[float], seats: int) -> list[int]:
    """Seats by D'Hondt's method; among equal quotients the first wins.

    >>> dhondt([100, 80, 30, 20], 8)
    [4, 3, 1, 0]
    """
    result = [0] * len(votes)
    for _ in range(seats):
        winner = max(range(len(votes)), key=lambda i: (votes[i] / (result[i] + 1), -i))
        result[winner] += 1
    return result
