"""Two chunks a rank laid out as a V, no bubble if F, I and W take the same time, in the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6 (ZB-V), and "Pipeline
Parallelism with Controllable Memory", arXiv 2405.15362 (V-ZB). Rank `r` of `p` has the stages r and
2p - 1 - r, so the first rank has both ends: the first microbatch comes back to it early, and all ranks
hold the same number of activations: 2p halves at most, p microbatches.

    1  2 (p - r) - 1 forwards of the first chunk
    2  r times: F of the second chunk, F of the first
    3  p - r times: F I W of the second chunk
    4  in turn: F I W of the first chunk, F I W of the second, until the forwards are used up
    5  r times: I of the first chunk, I of the second; p - r times: I W of the first
    6  the W that are left: those of the second chunk, then those of the first

The pattern is laid out for m >= 2p - 1; for less the microbatches that are too many are left out. It is the
order of `torch.distributed.pipelining`.

p = 2, m = 3:

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from weft.schedule.schedule import Action, Schedule, vee


def zbv(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, as a V.

    >>> print(*zbv(ranks=2, microbatches=1).ranks[1])
    1F0 2F0 2I0 2W0 1I0 1W0
    """
    rows = (_rank(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("zbv", tuple(map(tuple, rows)), vee(ranks))


def _rank(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The numbers are those of the docstring above; each stage takes its microbatches in order."""
    first, second = rank, 2 * ranks - 1 - rank
    behind = ranks - rank
    laid_out = max(2 * ranks - 1, microbatches)
    f, i, w = ((first, kind) for kind in "FIW")
    f2, i2, w2 = ((second, kind) for kind in "FIW")
    order = [f] * (2 * behind - 1)  # 1
    order += [f2, f] * rank  # 2
    order += [f2, i2, w2] * behind  # 3
    order += [f, i, w, f2, i2, w2] * (laid_out - second)  # 4
    order += [i, w, f2, i2, w2] * (second - ranks)
    order += [i, i2] * rank + [i, w] * behind  # 5
    order += [w2] * rank + [w] * rank  # 6
    numbers = {what: count() for what in (f, i, w, f2, i2, w2)}
    for what in order:
        number = next(numbers[what])
        if number < microbatches:
            yield Action(*what, number)
