"""Moving cuts for as long as a score gets better: the score may be anything, a simulated step for one.

The largest partition is not what a user waits for: a step also has a warm-up, transfers that hide behind
computing, and partitions that are visited twice. Which cuts are good for the step, its simulation knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from weft.errors import PlacementError
from weft.partition.placement import Mover, Placement

EVALUATIONS = 10_000
"""How many placements are scored at most."""

LARGEST_STEP = 32
"""By how many links a cut is moved at most."""

Score = Callable[[Placement], float]


def refine(placement: Placement, score: Score, evaluations: int = EVALUATIONS) -> Placement:
    """A placement whose score is at most that of `placement`: local search, deterministic.

    From large steps to small ones, each cut between two segments is tried on both sides of where it is, and so
    is each spread group on other partitions; what scores lower is kept. Placements that leave a segment empty,
    break a memory limit or move a fixed unit are not scored. The search ends when no step helps, or after
    `evaluations` scores. A candidate's `loads` are counted already, so a score that uses them takes
    O(partitions).

    Args:
        placement: Where it starts; its segments follow the program, as those of "exact" do.
        score: What to minimise.
        evaluations: How many placements are scored at most, the start included.

    Raises:
        PlacementError: If `evaluations` is below 1, or the segments do not follow the program.

    >>> from weft.graph import Graph, Unit
    >>> from weft.partition import Problem, place
    >>> problem = Problem(Graph(Unit(name, 1.0, 2.0, 0, 0) for name in "abcd"), partitions=2)
    >>> lighter_end = lambda placement: placement.loads[0].time_ms + 3 * placement.loads[1].time_ms
    >>> refine(place(problem), lighter_end).partitions
    (0, 0, 0, 1)
    """
    if evaluations < 1:
        raise PlacementError(f"evaluations is {evaluations}, it must be at least 1")
    state = _State(placement, score, evaluations)
    step = LARGEST_STEP
    while step and state.left:
        moved = False
        for move in state.moves(step):
            moved = state.attempt(*move) or moved
        if not moved:
            step //= 2
    return Placement(placement.problem, state.best.segments, placement.bound)


class _State:
    """The best placement so far."""

    def __init__(self, placement: Placement, score: Score, evaluations: int) -> None:
        self.best, self.score, self.left = placement, score, evaluations - 1
        self.least = score(placement)
        self.mover = Mover(placement.problem)
        self.chain = placement.problem.chain
        order = [placement.segments[link.units[0]] for link in self.chain.chain]
        if order != sorted(order):
            raise PlacementError('the segments do not follow the program: start from a placement by "exact"')
        count = placement.problem.segments
        self.starts = [bisect_left(order, segment) for segment in range(count + 1)]

    def moves(self, step: int) -> Iterator[tuple[int, int]]:
        """(number of a cut, or of a spread group from -1 downwards, by how much) for all of them."""
        for number in range(1, len(self.starts) - 1):
            yield number, step
            yield number, -step
        if self.best.problem.chunks == 1:
            for group in range(len(self.chain.spread)):
                yield -1 - group, step
                yield -1 - group, -step

    def attempt(self, number: int, step: int) -> bool:
        """Make a move if it helps; whether it did."""
        if not self.left:
            return False
        candidate = self._group(-1 - number, step) if number < 0 else self._cut(number, step)
        if candidate is None or not self._legal(candidate):
            return False
        self.left -= 1
        found = self.score(candidate)
        if not found < self.least - 1e-12 * abs(self.least):
            return False
        self.best, self.least = candidate, found
        if number > 0:
            self.starts[number] += step
        return True

    def _cut(self, number: int, step: int) -> Placement | None:
        """The best placement with a cut moved; None if a segment would be empty."""
        before, start, after = self.starts[number - 1 : number + 2]
        if not before < start + step < after:
            return None
        links = self.chain.chain[min(start, start + step) : max(start, start + step)]
        if any(link.fixed is not None for link in links):
            return None
        units = [unit for link in links for unit in link.units]
        return self.mover.move(self.best, units, number - (step > 0))

    def _group(self, number: int, step: int) -> Placement | None:
        """The best placement with a spread group moved; None if its partition would be another's, or empty."""
        link = self.chain.spread[number]
        home = self.best.segments[link.units[0]]
        target = home + step
        if link.fixed is not None or not 0 <= target < self.best.problem.partitions:
            return None
        if self.best.segments.count(home) == len(link.units):
            return None
        return self.mover.move(self.best, link.units, target)

    def _legal(self, candidate: Placement) -> bool:
        return all(
            new is old or new.memory_bytes <= device.memory_bytes
            for new, old, device in zip(
                candidate.loads, self.best.loads, candidate.problem.devices, strict=True
            )
        )
