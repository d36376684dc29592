"""Two chunks a rank laid out as a V, a forward of one chunk beside a backward of the other.

DeepSeek-AI, "DualPipe" (https://github.com/deepseek-ai/DualPipe), in the form that needs the parameters once:
"cut in half", by Sea AI Lab. Rank `r` of `p` has the stages r and 2p - 1 - r. Where messages take long they pass
while the other direction computes. A rank holds at most 2p + 1 halves, p + 1/2 microbatches.

    1  2 (p - r - 1) forwards of the first chunk
    2  r + 1 times: F of the first chunk, F of the second
    3  p - r - 1 times: I W of the second chunk, F of the second
    4  m - 2p + r + 1 times: F of the first and B of the second, F of the second and B of the first
    5  p - r - 1 times: B of the second, F of the second and B of the first
    6  r + 1 times: B of the second, B of the first; in the later half I in place of B
    7  p - r - 1 times: W, I of the first
    8  the W that are left, in the order of their I

The pattern is laid out for m >= 2p; for less the microbatches that are too many are left out. It is the order of
`torch.distributed.pipelining`.

p = 2, m = 4:

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from weft.schedule.schedule import Action, Schedule, vee


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, as a V.

    >>> print(*dualpipev(ranks=2, microbatches=1).ranks[1])
    1F0 2F0 2B0 1B0
    """
    rows = (_rank(rank, ranks, microbatches) for rank in range(ranks))
    return Schedule("dualpipev", tuple(map(tuple, rows)), vee(ranks))


def _rank(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """The numbers are those of the docstring above; each stage takes its microbatches in order."""
    first, second = rank, 2 * ranks - 1 - rank
    behind, before = ranks - rank - 1, rank + 1
    laid_out = max(2 * ranks, microbatches)
    order = [(first, "F")] * (2 * behind)  # 1
    order += [(first, "F"), (second, "F")] * before  # 2
    order += [(second, "I"), (second, "W"), (second, "F")] * behind  # 3
    order += [(first, "F"), (second, "B"), (second, "F"), (first, "B")] * (laid_out - 2 * ranks + before)  # 4
    order += [(second, "B"), (second, "F"), (first, "B")] * behind  # 5
    order += [
        (stage, "B" if number < before else "I") for number, stage in enumerate([second, first] * before)
    ]  # 6
    order += [(first, "W"), (first, "I")] * behind  # 7
    order += [(first, "W")] * before  # 8
    numbers = {(stage, kind): count() for stage in (first, second) for kind in "FB"}
    later: deque[Action] = deque()
    for stage, kind in order:
        if kind == "W":
            action = later.popleft()
        else:
            action = Action(stage, kind, next(numbers[stage, "F" if kind == "F" else "B"]))
        if kind == "I":
            later.append(action._replace(kind="W"))
        if action.microbatch < microbatches:
            yield action
