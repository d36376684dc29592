"""Placements of a graph of operations: few bytes between partitions, under two balances.

The units of a layered model stand in a chain, and cutting it by cost is what `weft.partition.place` does. A graph of
operations has branches, and the frontend counts operations and variables. Here several placements are found, and
`weft.plan.best_candidate` takes the one with the shortest step:

    order of units  ->  cut into one run a partition  ->  moves between neighbours
    METIS, where it is installed                      ->  moves between neighbours

>>> from weft.graph import Graph, Unit
>>> from weft.partition import Problem
>>> graph = Graph(Unit(f"layer{i}", 1.0, 2.0, 400, 64, 16) for i in range(6))
>>> found = candidates(Problem(graph, 3), balances(graph, [5] * 6, [2] * 6, "speed"))
>>> found[0].partitions, found[0].cut_bytes, found[0].imbalances
((0, 0, 1, 1, 2, 2), 32, (('operations', 1.0), ('variables', 1.0)))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from weft.errors import PlacementError
from weft.partition.balanced.candidate import Balance, Candidate, balances, cut_bytes
from weft.partition.balanced.contiguous import Runs
from weft.partition.balanced.items import Items
from weft.partition.balanced.levels import stages_of_placement
from weft.partition.balanced.metis import Adjacency, CutGraph
from weft.partition.balanced.moves import improve
from weft.partition.problem import Problem

__all__ = ["Balance", "Candidate", "balances", "candidates", "cut_bytes", "stages_of_placement"]

WIDER = 1.5
"""By what tolerances grow until a cut is within the limits."""
STEPS = 12
"""How often they grow; after that there are no limits."""
FITTING = 3
"""How many of the tolerances that allow a cut are used: wider ones may cut fewer bytes."""


def candidates(
    problem: Problem,
    given: Sequence[Balance],
    *,
    contiguous: bool = False,
    cut_graph: CutGraph | None = None,
) -> list[Candidate]:
    """Placements that differ, the contiguous cut of the program's order first.

    A limit is an even share and the balance's tolerance more, or the heaviest item if that is more. Units of a group
    are on one partition, and fixed units on theirs: by cuts that keep to that, and by cuts that do not, after which
    fixed units are put on their partitions.

    Args:
        problem: Graph, number of partitions, and fixed units; nothing else of it counts.
        given: The balances, as `balances` makes them.
        contiguous: Whether only placements are kept in which no tensor goes to a lower partition, so that each
            partition is one run of some order of the units.
        cut_graph: METIS, as `weft.partition.balanced.metis.load` gives it; left out if None.

    Raises:
        PlacementError: If a balance has not one weight for each unit, fixed units contradict their group, or no
            placement is contiguous and that was asked for.
    """
    _check(problem, given)
    items = Items.of(problem, given)
    search = _Search(problem, given, items)
    placements = [*search.cuts()]
    if cut_graph is not None and len(items) >= problem.partitions:
        placements += search.by_graph(cut_graph)
    names: dict[tuple[int, ...], str] = {}
    for name, where in placements:
        if not contiguous or search.follows(where):
            names.setdefault(tuple(items.of_units(where)), name)
    if not names:
        raise PlacementError(
            "no placement keeps each partition one run of units with these fixed units and groups: "
            "leave contiguous out, or fix units in ascending order"
        )
    return [
        Candidate.of(name, problem.graph, where, problem.partitions, given) for where, name in names.items()
    ]


class _Search:
    """The ways to find placements of items."""

    def __init__(self, problem: Problem, given: Sequence[Balance], items: Items) -> None:
        self.problem, self.given, self.items = problem, given, items
        self.partitions = problem.partitions

    def limits(self, wider: float) -> list[float]:
        """For each balance the most that a partition may have; anything if `wider` is infinite."""
        if wider == math.inf:
            return [math.inf] * len(self.given)
        return [
            max([(1.0 + wider * one.tolerance) * sum(weights) / self.partitions, *weights])
            for weights, one in zip(self.items.weights, self.given, strict=True)
        ]

    def cuts(self) -> Iterator[tuple[str, list[int]]]:
        """By dynamic programming over each order, and moves from there."""
        for order_name, order in self.items.orders.items():
            runs = Runs(self.items, order)
            found = [*self._fitting(runs, fixed=True)]
            if self.items.fixed:
                found += self._fitting(runs, fixed=False)
            for where, wider in found:
                name = f"{order_name}, {'no limits' if wider == math.inf else f'tolerance x {wider:.2g}'}"
                where = self.with_fixed(where)
                yield name, where
                yield f"{name}, moves", self.improved(where, self.limits(wider))

    def _fitting(self, runs: Runs, fixed: bool) -> Iterator[tuple[list[int], float]]:
        """Cuts within the narrowest limits that allow one, and within wider ones, with how wide they are."""
        before, left = None, FITTING
        for wider in (*(WIDER**step for step in range(STEPS)), math.inf):
            where = runs.cut(self.partitions, self.limits(wider), fixed)
            if where is not None:
                if where != before:
                    yield where, wider
                before, left = where, left - 1
                if not left:
                    return

    def by_graph(self, cut_graph: CutGraph) -> Iterator[tuple[str, list[int]]]:
        """By METIS, and moves from there; partitions in the order in which they are visited first."""
        parts = list(cut_graph(self._adjacency(), self.partitions))
        if len(parts) != len(self.items):
            return
        _, ranks = stages_of_placement(self.problem.graph, self.items.of_units(parts), self.partitions)
        number = {part: at for at, part in enumerate(dict.fromkeys(ranks))}
        where = self.with_fixed([number[part] for part in parts])
        yield "METIS", where
        yield "METIS, moves", self.improved(where, self.limits(1.0))

    def with_fixed(self, where: Sequence[int]) -> list[int]:
        """Fixed items on their partitions, all else as it is."""
        return [self.items.fixed.get(item, partition) for item, partition in enumerate(where)]

    def improved(self, where: Sequence[int], limits: Sequence[float]) -> list[int]:
        """By moves that need no further stage."""
        most = len(self._ranks(where))
        return improve(
            self.items, where, self.partitions, limits, lambda other: len(self._ranks(other)) <= most
        )

    def _ranks(self, where: Sequence[int]) -> tuple[int, ...]:
        return stages_of_placement(self.problem.graph, self.items.of_units(where), self.partitions)[1]

    def follows(self, where: Sequence[int]) -> bool:
        """True if no tensor goes to a lower partition."""
        flows = self.items.flows
        return all(where[source] <= where[target] for source, targets, _ in flows for target in targets)

    def _adjacency(self) -> Adjacency:
        edges: dict[tuple[int, int], int] = {}
        for source, targets, size in self.items.flows:
            for target in targets:
                for pair in ((source, target), (target, source)):
                    edges[pair] = edges.get(pair, 0) + size
        ordered = sorted(edges)
        starts = [0] * (len(self.items) + 1)
        for one, _ in ordered:
            starts[one + 1] += 1
        for item in range(len(self.items)):
            starts[item + 1] += starts[item]
        return Adjacency(
            tuple(starts),
            tuple(other for _, other in ordered),
            tuple(edges[pair] for pair in ordered),
            self.items.weights,
            tuple(one.tolerance for one in self.given),
        )


def _check(problem: Problem, given: Sequence[Balance]) -> None:
    faults = [
        f"the balance of {one.name} has {len(one.weights)} weights, but there are {len(problem.graph)} units: "
        "give one for each unit"
        for one in given
        if len(one.weights) != len(problem.graph)
    ]
    faults += [
        f"the balance of {one.name} has the weight {weight}, it must be finite and not negative"
        for one in given
        for weight in one.weights
        if not 0 <= weight < math.inf
    ]
    if faults:
        raise PlacementError("; ".join(faults))
