"""Disjoint sets, cycles and orders of numbers."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable


class DisjointSets:
    """The numbers below ``count`` in disjoint sets, which are joined (union-find).

    >>> sets = DisjointSets(4)
    >>> sets.join(0, 2)
    >>> sets.of(2) == sets.of(0), sets.of(1) == sets.of(3)
    (True, False)
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def of(self, number: int) -> int:
        """The smallest number in the set of this one, which stands for the set."""
        root = number
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[number] != root:
            self._parent[number], number = root, self._parent[number]
        return root

    def join(self, one: int, other: int) -> None:
        """Join the sets of these two."""
        low, high = sorted((self.of(one), self.of(other)))
        self._parent[high] = low

    def join_all(self, numbers: Iterable[int]) -> None:
        """Join the sets of all of these."""
        first, *others = numbers
        for other in others:
            self.join(first, other)


def circles(edges: dict[int, set[int]]) -> list[list[int]]:
    """The sets of more than one node that depend on each other (Tarjan's strongly connected components).

    ``edges``: for each node those that it depends on.

    >>> circles({0: {1}, 1: {0}, 2: {1}})
    [[1, 0]]
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in list(edges):
        if start in index:
            continue
        work = [(start, iter(edges[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(edges.get(other, ()))))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        other = stack.pop()
                        on_stack.discard(other)
                        component.append(other)
                        if other == node:
                            break
                    if len(component) > 1:
                        found.append(component)
    return found


def in_order(edges: dict[int, set[int]], first: dict[int, int]) -> list[int]:
    """The nodes so that each comes after those that it depends on; else by the number that each has in ``first``.

    >>> in_order({0: set(), 1: {2}, 2: set()}, {0: 5, 1: 0, 2: 1})
    [2, 1, 0]
    """
    after: dict[int, list[int]] = defaultdict(list)
    left = {root: len(sources) for root, sources in edges.items()}
    for root, sources in edges.items():
        for source in sources:
            after[source].append(root)
    ready = [(first[root], root) for root, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, root = heapq.heappop(ready)
        order.append(root)
        for user in after[root]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (first[user], user))
    assert len(order) == len(first), "units wait for each other"
    return order
