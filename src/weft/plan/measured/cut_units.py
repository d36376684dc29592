"""A traced model whose weights ranks cut among them: what of its units is left for each of these ranks."""

from __future__ import annotations

from dataclasses import replace

from weft.graph.model import Graph, Unit
from weft.plan.parallelism.layer import all_reduce_s
from weft.topology.cluster import Link

ACTIVATIONS = 24 / 34
"""The share of a transformer's activations that is sharded where its layers are: of 34 numbers for each of the hidden
ones 10 are whole (Korthikanti et al., arXiv 2205.05198, equation 2)."""


def degrees(graph: Graph, most: int) -> list[int]:
    """Over how many ranks the model can be cut, up to so many: powers of two, the first one 1.

    >>> degrees(Graph([Unit("a", 1.0, 1.0, 4, 4, cut_share=1.0, cut_ranks=4), Unit("b", 1.0, 1.0, 4, 4)]), 8)
    [1, 2, 4]
    """
    largest = min(most, max((unit.cut_ranks for unit in graph), default=1))
    return [2**power for power in range(largest.bit_length())]


def shard_units(graph: Graph, ranks: int, link: Link) -> Graph:
    """The graph as each of so many ranks has it, which all-reduce results over a link.

    A share c of a unit's times and parameters becomes c / ranks, and of its activations so much of `ACTIVATIONS`. A
    forward pass waits for one sum of its bytes, and a backward pass for another (Megatron-LM, arXiv 1909.08053).

    >>> whole = Graph([Unit("a", 2.0, 4.0, 400, 340, cut_share=1.0, cut_bytes=1000, cut_ranks=2)])
    >>> shard_units(whole, 2, Link(0.0, 1e6)).units[0]
    Unit(name='a', forward_ms=2.0, backward_ms=3.0, parameter_bytes=200, activation_bytes=220, ...)
    """
    if ranks == 1:
        return graph
    return Graph([_sharded(unit, ranks, link) for unit in graph], graph.tensors)


def _sharded(unit: Unit, ranks: int, link: Link) -> Unit:
    if unit.cut_ranks < ranks:
        return unit
    saved = unit.cut_share * (1 - 1 / ranks)
    left = 1 - saved
    sum_ms = 1e3 * all_reduce_s(unit.cut_bytes, ranks, link)
    halves = None if unit.input_ms is None or unit.weight_ms is None else (unit.input_ms, unit.weight_ms)
    return replace(
        unit,
        forward_ms=unit.forward_ms * left + sum_ms,
        backward_ms=unit.backward_ms * left + sum_ms,
        input_ms=None if halves is None else halves[0] * left + sum_ms,
        weight_ms=None if halves is None else halves[1] * left,
        parameter_bytes=round(unit.parameter_bytes * left),
        activation_bytes=round(unit.activation_bytes * (1 - ACTIVATIONS * saved)),
        transient_bytes=round(unit.transient_bytes * (1 - ACTIVATIONS * saved)),
        parameters=round(unit.parameters * left),
        group=unit.group or unit.cut_group,
    )
