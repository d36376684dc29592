"""Later ranks begin later and end earlier: what of a step that costs, and cuts that allow for it.

A rank cannot begin before those before it have passed the first microbatch on, and when it is done they still have the
last backward pass to do. So where each rank runs one stage and m microbatches go through all of them, a step takes at
least

    max over ranks r of   load(r)  +  late * (load(0) + ... + load(r - 1)),      late = 1 / m

with the loads of all microbatches, and the first rank may have more than the last. How much more depends on what a
schedule holds in flight: with 1F1B the first rank waits for gradients, too, unless it may begin another microbatch
meanwhile; with GPipe it has no use for more. So cuts for several parts of ``late`` are worth simulating.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

PARTS = (0.25, 0.5, 0.75, 1.0)
"""What parts of ``late`` to try, besides none."""
LESS = 1e-9
"""What a move must gain, so that rounding does not decide."""


def latest(loads: Sequence[float], late: float) -> float:
    """The least that a step takes, in the unit of the loads.

    >>> latest([4, 4], late=1 / 4), latest([4, 3], late=1 / 4)
    (5.0, 4.0)
    """
    before = most = 0.0
    for load in loads:
        most = max(most, load + late * before)
        before += load
    return most


def allow(
    costs: Sequence[float],
    stages: Sequence[int],
    count: int,
    late: float,
    groups: Sequence[int | str | None] | None = None,
) -> list[int]:
    """The stages of all units, of ``count``, with cuts moved for as long as :func:`latest` becomes less.

    Neighbouring cuts move together, a unit at a time; no stage loses its last unit. For two stages no other cut is
    better, for more the result may miss the optimum. Units of a group stay where they are.

    >>> allow([1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], 2, late=1 / 2)
    [0, 0, 0, 0, 0, 1, 1, 1]
    """
    groups = groups or [None] * len(costs)
    free = [unit for unit, group in enumerate(groups) if group is None]
    order = [stages[unit] for unit in free]
    if any(one > other for one, other in pairwise(order)):
        return list(stages)
    held = [0.0] * count
    for unit, group in enumerate(groups):
        if group is not None:
            held[stages[unit]] += costs[unit]
    sums = [0.0, *accumulate(costs[unit] for unit in free)]

    def loads(cuts: Sequence[int]) -> list[float]:
        bounds = [0, *cuts, len(free)]
        return [held[at] + sums[end] - sums[begin] for at, (begin, end) in enumerate(pairwise(bounds))]

    def keeps_all(cuts: Sequence[int]) -> bool:
        return all(begin < end for begin, end in pairwise([0, *cuts, len(free)]))

    cuts = [bisect_left(order, stage) for stage in range(1, count)]
    least = latest(loads(cuts), late)
    while True:
        moved = [
            [cut + by if one <= number <= other else cut for number, cut in enumerate(cuts)]
            for one in range(count - 1)
            for other in range(one, count - 1)
            for by in (-1, 1)
        ]
        better = min(filter(keeps_all, moved), key=lambda some: latest(loads(some), late), default=cuts)
        found = latest(loads(better), late)
        if found >= least - LESS:
            break
        cuts, least = better, found
    placed = list(stages)
    for number, unit in enumerate(free):
        placed[unit] = sum(cut <= number for cut in cuts)
    return placed
