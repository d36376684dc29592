"""Two chunks a rank laid out as a V, in a third of the memory of 1F1B.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 (V-Min). The microbatch goes on
to the next stage at once (`building_block`). A rank holds (2p + 8) / 3 halves at most, (p + 4) / 3
microbatches. If F, I and W take the same time the bubble is about two thirds of that of `1f1b`. If they do
not, the ranks wait for each other in every microbatch, and the bubble grows with m: use `v_half` or `zbv`
where memory allows.

p = 2, m = 3:

    rank 0: 0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    rank 1: 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
"""

from __future__ import annotations

from weft.schedule.generators.building_block import Pace, repeat
from weft.schedule.schedule import Schedule

PACE: Pace = (1, 1, 1, 1)
"""Slots from stage to stage: F down the V and up, I down and up."""


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, as a V.

    >>> print(*v_min(ranks=1, microbatches=2).ranks[0])
    0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1
    """
    return repeat("v_min", PACE, ranks, microbatches)
