"""Backward first: one forward, one backward (1F1B).

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019,
section 3.2 (with a flush at the end of the step, as in "PipeDream-2BW", arXiv 2006.09503). The bubble
is that of `gpipe`, and rank `r` of `p` holds at most `p - r` microbatches instead of all. Where this
differs: `active` limits the microbatches in flight further, at the price of idle time.

Rank `r` warms up with min(p - r, active, m) forwards and then runs a backward and a forward in turn:

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

from __future__ import annotations

from weft.schedule.schedule import Action, Schedule, loop


def one_f_one_b(ranks: int, microbatches: int, active: int | None = None) -> Schedule:
    """One stage a rank; a rank holds at most `active` microbatches, if that is given.

    >>> print(*one_f_one_b(ranks=2, microbatches=3).ranks[0])
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    limit = microbatches if active is None else min(active, microbatches)
    rows = (_rank(stage, min(ranks - stage, limit), microbatches) for stage in range(ranks))
    return Schedule("1f1b", tuple(rows), loop(ranks))


def _rank(stage: int, warmup: int, microbatches: int) -> tuple[Action, ...]:
    actions = [Action(stage, "F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        actions.append(Action(stage, "B", microbatch))
        if microbatch + warmup < microbatches:
            actions.append(Action(stage, "F", microbatch + warmup))
    return tuple(actions)
