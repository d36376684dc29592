"""1F1B with the backward pass split, in the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.2 (ZB-H1). The gradient of
the inputs (I) is what the rank above waits for; the gradient of the weights (W) can wait. Rank `r` runs
W `r` microbatches behind I, so every rank holds p microbatches at most, as rank 0 does in
`1f1b`. A rank's own bubble is (p - 1) (F + I - W) where that of `1f1b` is (p - 1) (F + I + W):
a third of it if F, I and W take the same time.

Where this differs: `active` limits the microbatches in flight further, at the price of idle time.

p = 3, m = 4:

    rank 0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""

from __future__ import annotations

from weft.schedule.schedule import Action, Schedule, loop


def zb_h1(ranks: int, microbatches: int, active: int | None = None) -> Schedule:
    """One stage a rank; a rank holds at most `active` microbatches, if that is given.

    >>> print(*zb_h1(ranks=2, microbatches=2).ranks[1])
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    limit = min(ranks if active is None else active, ranks, microbatches)
    rows = []
    for stage in range(ranks):
        warmup = min(ranks - stage, limit)
        rows.append(_rank(stage, warmup, limit - warmup, microbatches))
    return Schedule("zb_h1", tuple(rows), loop(ranks))


def _rank(stage: int, warmup: int, behind: int, microbatches: int) -> tuple[Action, ...]:
    """`behind`: how many microbatches W stays behind I."""
    actions = [Action(stage, "F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        actions.append(Action(stage, "I", microbatch))
        if microbatch >= behind:
            actions.append(Action(stage, "W", microbatch - behind))
        if microbatch + warmup < microbatches:
            actions.append(Action(stage, "F", microbatch + warmup))
    actions += [Action(stage, "W", microbatch) for microbatch in range(microbatches - behind, microbatches)]
    return tuple(actions)
