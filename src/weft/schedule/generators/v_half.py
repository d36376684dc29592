"""Two chunks a rank laid out as a V, in half the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 (V-Half). The microbatch walks down
the V at one slot a stage and up at two (`building_block`). A rank holds p + 2 halves at most (p + 1
if p is odd), (p + 2) / 2 microbatches. If F, I and W take the same time the bubble is half that
of `1f1b`.

p = 2, m = 3:

    rank 0: 0F0 3F0 0F1 3I0 3W0 3F1 0F2 0I0 3I1 0W0 3W1 3F2 0I1 3I2 0W1 3W2 0I2 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1W1 2I2 1I2 2W2 1W2
"""

from __future__ import annotations

from weft.schedule.generators.building_block import Pace, repeat
from weft.schedule.schedule import Schedule

PACE: Pace = (1, 2, 1, 2)
"""Slots from stage to stage: F down the V and up, I down and up."""


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, as a V.

    >>> print(*v_half(ranks=1, microbatches=2).ranks[0])
    0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1
    """
    return repeat("v_half", PACE, ranks, microbatches)
