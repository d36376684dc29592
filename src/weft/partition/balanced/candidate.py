"""A placement that may be chosen, and the numbers that it is judged by: cut bytes and two imbalances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlacementError
from weft.graph.model import Flow, Graph

TIGHT, LOOSE = 0.1, 0.5
"""Tolerances: by what part of an even share a partition may have more."""


@dataclass(frozen=True)
class Balance:
    """A quantity to be spread evenly over the partitions.

    Attributes:
        name: What is counted, as a table shows it.
        weights: How much of it each unit has.
        tolerance: By what part of an even share a partition may have more, if the units allow it.
    """

    name: str
    weights: tuple[float, ...]
    tolerance: float = TIGHT

    def imbalance(self, where: Sequence[int], partitions: int) -> float:
        """The largest load over the mean load; 1 where there is nothing to balance.

        >>> Balance("operations", (3, 1, 2)).imbalance([0, 0, 1], partitions=2)
        1.3333333333333333
        """
        loads = [0.0] * partitions
        for weight, partition in zip(self.weights, where, strict=True):
            loads[partition] += weight
        return max(loads) * partitions / sum(loads) if sum(loads) else 1.0


def balances(
    graph: Graph, operations: Sequence[int], variables: Sequence[int], optimize: str
) -> tuple[Balance, Balance]:
    """The two balances of a graph.

    With "speed" they are the numbers of operations and of variables, with "memory" the bytes of variables
    (`parameter_bytes`) and, with a loose tolerance, the number of operations.

    Args:
        graph: The units.
        operations: How many operations each unit has.
        variables: How many variables each unit has.
        optimize: `speed` or `memory`.

    Raises:
        PlacementError: If `optimize` is something else, or there is not one count for each unit.
    """
    faults = (
        [] if optimize in ("speed", "memory") else [f'optimize is "{optimize}": write "speed" or "memory"']
    )
    faults += [
        f"{name} has {len(counts)} numbers, but there are {len(graph)} units: give one for each unit"
        for name, counts in (("operations", operations), ("variables", variables))
        if len(counts) != len(graph)
    ]
    if faults:
        raise PlacementError("; ".join(faults))
    if optimize == "speed":
        return Balance("operations", tuple(operations)), Balance("variables", tuple(variables))
    held = tuple(unit.parameter_bytes for unit in graph)
    return Balance("bytes of variables", held), Balance("operations", tuple(operations), LOOSE)


@dataclass(frozen=True)
class Candidate:
    """A placement that may be chosen.

    Attributes:
        name: How it was found.
        partitions: The partition of each unit.
        cut_bytes: What goes between partitions in a forward pass of one microbatch: a tensor counts once for
            each partition that gets it.
        imbalances: For each balance its name, and the largest load over the mean one.
    """

    name: str
    partitions: tuple[int, ...]
    cut_bytes: int
    imbalances: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(
        cls, name: str, graph: Graph, where: Sequence[int], partitions: int, given: Sequence[Balance]
    ) -> Candidate:
        """The candidate with its numbers counted."""
        shares = tuple((one.name, one.imbalance(where, partitions)) for one in given)
        return cls(name, tuple(where), cut_bytes(graph.flows, where), shares)


def cut_bytes(flows: Sequence[Flow], where: Sequence[int]) -> int:
    """Bytes between partitions: a tensor counts once for each partition that gets it.

    >>> cut_bytes([(0, (1, 2, 3), 16)], [0, 1, 1, 2])
    32
    """
    return sum(
        size * len({where[target] for target in targets} - {where[source]}) for source, targets, size in flows
    )
