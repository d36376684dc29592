"""The cost of several replicas of a pipeline: optimizer states that they share, and gradients that they all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.graph.model import Graph
from weft.partition.cost import COPIES
from weft.plan.parallelism.layer import all_reduce_s
from weft.topology.cluster import Link

KEPT_WHOLE = 2
"""Of `COPIES` of the parameters, those that every replica has whole: parameters and gradients."""


def sharing_states(graph: Graph, replicas: int) -> Graph:
    """The graph as memory sees it if so many replicas share optimizer states.

    A parameter of 1 byte counts (2 + 2 / replicas) / 4 bytes, since memory counts 4 copies of each.

    >>> from weft.graph import Unit
    >>> [unit.parameter_bytes for unit in sharing_states(Graph([Unit("u", 1.0, 2.0, 800, 0)]), 4)]
    [500]
    """
    share = (KEPT_WHOLE + (COPIES - KEPT_WHOLE) / replicas) / COPIES
    units = [replace(unit, parameter_bytes=round(unit.parameter_bytes * share)) for unit in graph]
    return Graph(units, graph.tensors)


def added_up_s(graph: Graph, partitions: Sequence[int], replicas: int, link: Link) -> float:
    """The seconds of an all-reduce of the gradients of the rank that has most.

    The ring is that of `weft.plan.parallelism.layer.all_reduce_s`, with gradients as large as parameters.

    Args:
        graph: The units.
        partitions: The partition of each unit.
        replicas: How many copies of the pipeline there are.
        link: Between ranks of different copies.

    >>> from weft.graph import Unit
    >>> added_up_s(Graph(Unit(name, 1.0, 2.0, 10**9, 0) for name in "ab"), (0, 1), 2, Link(0.0, 1e9))
    1.0
    """
    of_rank = [0] * (1 + max(partitions))
    for unit, partition in zip(graph, partitions, strict=True):
        of_rank[partition] += unit.parameter_bytes
    return all_reduce_s(max(of_rank), replicas, link)
