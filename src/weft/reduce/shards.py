"""The bounds of each rank's shard of a flat tensor: equal shards, so that every rank moves as much as any other."""

from __future__ import annotations


def bounds(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Where each rank's shard of ``numel`` elements begins and ends; lengths differ by one at most.

    >>> bounds(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    edges = [numel * rank // ranks for rank in range(ranks + 1)]
    return list(zip(edges, edges[1:], strict=False))
