"""METIS as one more source of placements, where its Python package is installed.

METIS (Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998) cuts undirected graphs under several balances at once. It
knows nothing of the direction of tensors, so a microbatch may come back to partitions often. The package `pymetis`
passes one balance only, but its extension exports the C functions of METIS, so they are called from there. Numbers
in, numbers out: nothing of METIS is kept between calls.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST = 10**6
"""To what weights are scaled: METIS adds them up with 32 bits of precision."""


@dataclass(frozen=True)
class Adjacency:
    """An undirected graph for METIS.

    Attributes:
        starts: Where the neighbours of each vertex start in `neighbours`, and where the last ones end.
        neighbours: The neighbours of one vertex after the other.
        bytes: What cutting each of these edges costs.
        weights: For each balance the weight of each vertex.
        tolerances: For each balance by what part of an even share a partition may have more.
    """

    starts: tuple[int, ...]
    neighbours: tuple[int, ...]
    bytes: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    tolerances: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.starts) - 1


CutGraph = Callable[[Adjacency, int], Sequence[int]]
"""From a graph and the number of partitions to the partition of each vertex."""


def load() -> CutGraph | None:
    """METIS from the package `pymetis`; None where that is not installed, or does not export METIS."""
    try:
        extension = importlib.import_module("pymetis._internal")
        call = ctypes.CDLL(extension.__file__).METIS_PartGraphRecursive
    except (ImportError, OSError, AttributeError, TypeError):
        return None

    def cut_graph(graph: Adjacency, partitions: int) -> Sequence[int]:
        return _call(call, graph, partitions)

    return cut_graph


def _call(call: Callable[..., int], graph: Adjacency, partitions: int) -> Sequence[int]:
    """The partition of each vertex, by METIS_PartGraphRecursive with 64-bit indices."""
    count, balances = len(graph), len(graph.weights)
    scaled = [_whole(weights) for weights in graph.weights]
    by_vertex = [weights[vertex] for vertex in range(count) for weights in scaled]
    parts = _indices([0] * count)
    status = call(
        _indices([count]), _indices([balances]), _indices(graph.starts), _indices(graph.neighbours),
        _indices(by_vertex), None, _indices([max(1, size) for size in _whole(graph.bytes)]), _indices([partitions]),
        None, (ctypes.c_float * balances)(*(1.0 + tolerance for tolerance in graph.tolerances)), None,
        _indices([0]), parts,
    )  # fmt: skip
    return list(parts) if status == 1 else []


def _indices(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _whole(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers that add up to about `MOST`; all 1 if there are none.

    >>> _whole([0.25, 0.75]), _whole([0, 0])
    ([250000, 750000], [1, 1])
    """
    total = sum(weights)
    return [round(weight * MOST / total) for weight in weights] if total else [1] * len(weights)
