"""Graph to placement: what units cost, and algorithms that balance the partitions.

>>> from weft.graph import Graph, Unit
>>> from weft.partition import Problem, place
>>> graph = Graph(Unit(f"block{i}", 1.0, 2.0, 400, 64, 16) for i in range(6))
>>> place(Problem(graph, partitions=3)).partitions
(0, 0, 1, 1, 2, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.errors import PlacementError
from weft.partition.chain.chunks import chunked
from weft.partition.chain.exact import exact
from weft.partition.placement import Load, Placement, step_ms
from weft.partition.problem import LAYOUTS, Device, Problem, in_flight
from weft.partition.refine import refine
from weft.partition.tree import tree

__all__ = [
    "ALGORITHMS",
    "LAYOUTS",
    "Device",
    "Load",
    "Placement",
    "Problem",
    "in_flight",
    "place",
    "refine",
    "step_ms",
]

ALGORITHMS: Mapping[str, Callable[[Problem], Placement]] = {
    "exact": lambda problem: exact(problem) if problem.chunks == 1 else chunked(problem),
    "tree": tree,
}
"""Name to algorithm."""


def place(problem: Problem, algorithm: str = "exact") -> Placement:
    """The placement that the algorithm of that name (a key of `ALGORITHMS`) finds.

    Raises:
        PlacementError: If there is no such algorithm, or its placement would break a limit of the problem.
    """
    if algorithm not in ALGORITHMS:
        raise PlacementError(f'there is no algorithm "{algorithm}", write one of {", ".join(ALGORITHMS)}')
    return ALGORITHMS[algorithm](problem).check()
