"""All forwards, then all backwards (GPipe).

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
arXiv 1811.06965. With `p` stages and `m` microbatches the bubble is (p - 1) / (m + p - 1) of the
step, and every rank holds the activations of all `m` microbatches.

    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
"""

from __future__ import annotations

from weft.schedule.schedule import Action, Schedule, loop


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """One stage a rank.

    >>> print(*gpipe(ranks=2, microbatches=2).ranks[1])
    1F0 1F1 1B0 1B1
    """
    rows = (
        tuple(Action(stage, kind, microbatch) for kind in ("F", "B") for microbatch in range(microbatches))
        for stage in range(ranks)
    )
    return Schedule("gpipe", tuple(rows), loop(ranks))
