"""Several chunks a rank, breadth first: all forwards of a chunk before those of the next.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", arXiv 2211.05953. Rank `r` has the stages r, r + p,
r + 2p, ... The bubble is that of `interleaved_1f1b`, (p - 1) / (v m) of the work, but every rank holds the
activations of all `m` microbatches, as in `gpipe`. All microbatches pass a chunk at a stretch, so what is
done once for each chunk (gathering sharded weights, averaging gradients) is done once a step
and can hide behind the other chunks.

Where this differs: `torch.distributed.pipelining` runs the backwards of a chunk from the last
microbatch to the first; here they run from the first to the last, as in all other schedules. Length and
memory are the same.

p = 2, m = 3, v = 2:

    rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2
"""

from __future__ import annotations

from weft.schedule.schedule import Action, Schedule, loop


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """`chunks` stages a rank, one after the other.

    >>> print(*looped_bfs(ranks=2, microbatches=1).ranks[1])
    1F0 3F0 3B0 1B0
    """
    rows = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        order = [("F", stage) for stage in own] + [("B", stage) for stage in reversed(own)]
        rows.append(tuple(Action(stage, kind, i) for kind, stage in order for i in range(microbatches)))
    return Schedule("looped_bfs", tuple(rows), loop(ranks, chunks))
