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

from collections.abc import Sequence
from itertools import accumulate

from weft.plan.v_apex import nearest

PARTS = (0.25, 0.5, 0.75, 1.0)
"""What parts of ``late`` to try, besides none."""


def least_step(loads: Sequence[float], late: float) -> float:
    """The least that a step takes, in the unit of the loads.

    >>> least_step([4, 4], late=1 / 4), least_step([4, 3], late=1 / 4)
    (5.0, 4.0)
    """
    before = most = 0.0
    for load in loads:
        most = max(most, load + late * before)
        before += load
    return most


def shift_cuts(
    costs: Sequence[float],
    stages: Sequence[int],
    count: int,
    late: float,
    groups: Sequence[int | str | None] | None = None,
) -> list[int]:
    """The stages of all units, of ``count``, with each cut where :func:`least_step` is nearest to its least.

    That is the same for all stages if those up to r (from 0) have 1 - (1 - late)^(r + 1) of what all count ones have
    by this formula. No stage is left without units that may move.

    Args:
        costs: What each unit costs, in program order.
        stages: Where the units are; those of a group stay there.
        count: How many stages there are.
        late: What part of the loads before it counts with each stage's own, from 0 to below 1; with 0 nothing moves.
        groups: A number for each unit: units with the same one lie together; None for a unit on its own.

    >>> shift_cuts([1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], count=2, late=1 / 2)
    [0, 0, 0, 0, 0, 1, 1, 1]
    """
    groups = groups or [None] * len(costs)
    free = [unit for unit, group in enumerate(groups) if group is None]
    placed = list(stages)
    if not late or len(free) < count:
        return placed
    held = [0.0] * count
    for unit, group in enumerate(groups):
        if group is not None:
            held[stages[unit]] += costs[unit]
    before = [0.0, *accumulate(costs[unit] for unit in free)]
    share = (before[-1] + sum(held)) / (1.0 - (1.0 - late) ** count)
    begin = 0
    for stage, held_there in enumerate(accumulate(held)):
        wanted = share * (1.0 - (1.0 - late) ** (stage + 1)) - held_there
        after = count - 1 - stage
        end = nearest(before, wanted, begin + 1, len(free) - after) if after else len(free)
        for unit in free[begin:end]:
            placed[unit] = stage
        begin = end
    return placed
