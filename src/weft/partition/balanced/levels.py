"""The stages of any placement: visits to partitions, as few as a short rule finds.

Units that are not in a chain may run in any order that the tensors allow. So a partition is visited when something
can run there, and then everything runs there that can:

    unit        a   b   c   d   e        a -> b -> d -> e,  a -> c -> e
    partition   0   1   0   1   0
    stage       0   1   0   1   2        ranks 0 1 0, though the program changes its partition four times

Which partition is next:

1.  One whose units can all run now, the lowest number first. A visit to it comes anyhow, and others only gain by it.
    So where no tensors flow from a later partition to an earlier one, each partition has one stage.
2.  Else that of the unit with the lowest level. A level is one more than that of the unit's predecessors on other
    partitions, and as late as the users of the unit allow. Each pair of a level and a partition is visited at most
    once, so there are never more stages than such pairs.

A unit without predecessors then moves to the last stage of its partition from which its first user can still have
the result, so that the result is not kept for longer than needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from weft.errors import PlacementError
from weft.graph.model import Graph


def stages_of_placement(
    graph: Graph, partitions_of_units: Sequence[int], partitions: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stage of each unit, and the rank of each stage.

    A tensor never goes to an earlier stage, and a unit's stage is on the unit's partition. Two stages in a row are on
    different partitions. A partition without units has an empty stage at the end.

    Args:
        graph: The units.
        partitions_of_units: The partition of each unit.
        partitions: How many there are; one more than the highest number if not given.

    Raises:
        PlacementError: If there is not one partition for each unit, or one is none of those that there are.

    >>> from weft.graph import Tensor, Unit
    >>> units = [Unit(name, 1.0, 2.0, 0, 0) for name in "abcde"]
    >>> flows = [("a", "b"), ("b", "d"), ("d", "e"), ("a", "c"), ("c", "e")]
    >>> graph = Graph(units, [Tensor(one, (other,), 8) for one, other in flows])
    >>> stages_of_placement(graph, [0, 1, 0, 1, 0])
    ((0, 1, 0, 1, 2), (0, 1, 0))
    """
    count = partitions if partitions is not None else 1 + max(partitions_of_units, default=0)
    _check(graph, partitions_of_units, count)
    stages, ranks = _visits(graph.users, partitions_of_units, levels_of(graph.users, partitions_of_units))
    _delay(stages, ranks, graph.users, partitions_of_units)
    idle = sorted(set(range(count)) - set(ranks))
    return tuple(stages), (*ranks, *idle)


def levels_of(users: Sequence[Sequence[int]], where: Sequence[int]) -> list[int]:
    """The number of partition changes before each unit, at the latest that adds no change at the end.

    >>> levels_of([(2,), (2,), ()], [0, 1, 1])
    [0, 1, 1]
    """
    earliest = [0] * len(where)
    for unit, targets in enumerate(users):
        for target in targets:
            earliest[target] = max(earliest[target], earliest[unit] + (where[unit] != where[target]))
    levels = [max(earliest, default=0)] * len(where)
    for unit in reversed(range(len(where))):
        for target in users[unit]:
            levels[unit] = min(levels[unit], levels[target] - (where[unit] != where[target]))
    return levels


def _visits(
    users: Sequence[Sequence[int]], where: Sequence[int], levels: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The stage of each unit and the partition of each stage, by rules 1 and 2."""
    count = 1 + max(where, default=-1)
    missing = [0] * len(where)
    crossing = [0] * count
    left = [0] * count
    for unit, targets in enumerate(users):
        left[where[unit]] += 1
        for target in targets:
            missing[target] += 1
            crossing[where[target]] += where[unit] != where[target]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for unit, partition in enumerate(where):
        if not missing[unit]:
            ready[partition].append((levels[unit], unit))
    for heap in ready:
        heapify(heap)
    stages, ranks = [0] * len(where), list[int]()
    while any(left):
        whole = [one for one in range(count) if left[one] and not crossing[one]]
        partition = whole[0] if whole else min(filter(ready.__getitem__, range(count)), key=ready.__getitem__)
        while ready[partition]:
            _, unit = heappop(ready[partition])
            stages[unit] = len(ranks)
            left[partition] -= 1
            for target in users[unit]:
                missing[target] -= 1
                crossing[where[target]] -= where[target] != partition
                if not missing[target]:
                    heappush(ready[where[target]], (levels[target], target))
        ranks.append(partition)
    return stages, ranks


def _delay(
    stages: list[int], ranks: Sequence[int], users: Sequence[Sequence[int]], where: Sequence[int]
) -> None:
    """Units without predecessors go to the last stage of their partition that is not behind their first user's."""
    visits: dict[int, list[int]] = {}
    for stage, partition in enumerate(ranks):
        visits.setdefault(partition, []).append(stage)
    later = {target for targets in users for target in targets}
    for unit, targets in enumerate(users):
        if targets and unit not in later:
            first = min(stages[target] for target in targets)
            own = visits[where[unit]]
            stages[unit] = own[bisect_right(own, first) - 1]


def _check(graph: Graph, where: Sequence[int], count: int) -> None:
    if len(where) != len(graph):
        raise PlacementError(
            f"the placement names {len(where)} partitions, but there are {len(graph)} units: give one for each unit"
        )
    faults = [
        f'"{unit.name}" is on partition {partition}, but there are {count}'
        for unit, partition in zip(graph, where, strict=True)
        if not 0 <= partition < count
    ]
    if faults:
        raise PlacementError("; ".join(faults))
