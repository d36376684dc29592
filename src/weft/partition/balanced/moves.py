"""Moving items to the partitions of their neighbours, one after the other, for as long as that helps.

A pass moves the best item again and again, also where that makes things worse for a while, each item once; what
stays is the best state on the way. Fiduccia and Mattheyses, "A Linear-Time Heuristic for Improving Network
Partitions", 19th Design Automation Conference, 1982. Differences: several partitions and two balances, so the best
move is looked for among those of all items at a border; and a move that needs more stages is refused.

What is made smaller is, in this order: loads above the limits, cut bytes, and the squares of the loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weft.partition.balanced.items import Items

PASSES = 4
"""How many passes there are at most."""
PATIENCE = 25
"""After so many moves without a better state a pass ends."""

Score = tuple[float, int, float]
"""Loads above the limits, as shares of the whole; cut bytes; squares of the loads, as shares."""


def improve(
    items: Items,
    where: Sequence[int],
    partitions: int,
    limits: Sequence[float],
    admits: Callable[[Sequence[int]], bool],
) -> list[int]:
    """A placement of the items that scores at most what `where` does; no partition gets empty, fixed items stay.

    Args:
        items: What is moved.
        where: The partition of each item.
        partitions: How many there are.
        limits: For each balance the most that a partition should have.
        admits: Whether the partitions of all items may be so, for instance because there are no more stages.
    """
    state = _State(items, list(where), partitions, limits)
    for _ in range(PASSES):
        before = state.score
        state = _pass(state, admits)
        if not state.score < before:
            break
    return state.where


def _pass(state: _State, admits: Callable[[Sequence[int]], bool]) -> _State:
    """The best state on the way, which may be the first."""
    best, best_score, idle = list(state.where), state.score, 0
    moved = set(state.items.fixed)
    refused: set[tuple[int, int]] = set()
    while idle < PATIENCE:
        found = min(
            (
                (state.after(item, target, more), item, target)
                for item, target, more in state.moves()
                if item not in moved and (item, target) not in refused
            ),
            default=None,
        )
        if found is None:
            break
        _, item, target = found
        idle += 1
        if not admits([*state.where[:item], target, *state.where[item + 1 :]]):
            refused.add((item, target))
            continue
        state.move(item, target)
        moved.add(item)
        if state.score < best_score:
            best, best_score, idle = list(state.where), state.score, 0
    return _State(state.items, best, state.partitions, state.limits)


class _State:
    """Items on partitions, with what is counted of them."""

    def __init__(self, items: Items, where: list[int], partitions: int, limits: Sequence[float]) -> None:
        self.items, self.where, self.partitions, self.limits = items, where, partitions, limits
        self.totals = [sum(weights) or 1.0 for weights in items.weights]
        self.loads = [[0.0] * partitions for _ in items.weights]
        self.held = [0] * partitions
        for item, partition in enumerate(where):
            self.held[partition] += 1
            for loads, weights in zip(self.loads, items.weights, strict=True):
                loads[partition] += weights[item]
        self.users = [[0] * partitions for _ in items.flows]
        """For each flow how many of its targets are on each partition."""
        self.cut = 0
        for users, (source, targets, size) in zip(self.users, items.flows, strict=True):
            for target in targets:
                users[where[target]] += 1
            self.cut += size * sum(bool(count) for at, count in enumerate(users) if at != where[source])
        self._moves: dict[int, list[tuple[int, int]]] = {}

    @property
    def score(self) -> Score:
        """The score to make smaller."""
        over = squares = 0.0
        for loads, total, limit in zip(self.loads, self.totals, self.limits, strict=True):
            for load in loads:
                over += max(0.0, load - limit) / total
                squares += (load / total) ** 2
        return round(over, 9), self.cut, round(squares, 9)

    def moves(self) -> Iterator[tuple[int, int, int]]:
        """(item, partition of a neighbour, change of the cut), for all items that do not leave a partition empty."""
        for item, home in enumerate(self.where):
            if self.held[home] > 1:
                if item not in self._moves:
                    self._moves[item] = list(self._find(item, home))
                for target, more in self._moves[item]:
                    yield item, target, more

    def _find(self, item: int, home: int) -> Iterator[tuple[int, int]]:
        items = self.items
        sources = {self.where[items.flows[flow][0]] for flow in items.received[item]}
        users = (self.users[flow] for flow in items.sent[item])
        near = sources | {at for counts in users for at, count in enumerate(counts) if count}
        for target in sorted(near - {home}):
            more = 0
            for flow in items.received[item]:
                source, _, size = items.flows[flow]
                counts, origin = self.users[flow], self.where[source]
                more += size * (
                    (target != origin and not counts[target]) - (home != origin and counts[home] == 1)
                )
            for flow in items.sent[item]:
                counts, size = self.users[flow], items.flows[flow][2]
                more += size * (bool(counts[home]) - bool(counts[target]))
            yield target, more

    def after(self, item: int, target: int, more: int) -> Score:
        """By how much the score would change."""
        home = self.where[item]
        over = squares = 0.0
        for loads, weights, total, limit in zip(
            self.loads, self.items.weights, self.totals, self.limits, strict=True
        ):
            for load, change in ((loads[home], -weights[item]), (loads[target], weights[item])):
                over += (max(0.0, load + change - limit) - max(0.0, load - limit)) / total
                squares += ((load + change) ** 2 - load**2) / total**2
        return round(over, 9), more, round(squares, 9)

    def move(self, item: int, target: int) -> None:
        """The item goes to a partition."""
        home, items = self.where[item], self.items
        self.cut += next(more for at, more in self._moves[item] if at == target)
        self.where[item] = target
        self.held[home] -= 1
        self.held[target] += 1
        for loads, weights in zip(self.loads, items.weights, strict=True):
            loads[home] -= weights[item]
            loads[target] += weights[item]
        for flow in items.received[item]:
            self.users[flow][home] -= 1
            self.users[flow][target] += 1
        for flow in (*items.received[item], *items.sent[item]):
            source, targets, _ = items.flows[flow]
            for touched in (source, *targets):
                self._moves.pop(touched, None)
        self._moves.pop(item, None)
