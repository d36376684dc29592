"""Several chunks a rank, backward first: 1F1B over virtual stages.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
arXiv 2104.04473, section 2.2. Rank `r` has the stages r, r + p, r + 2p, ... With `v` chunks a rank the
bubble is (p - 1) / (v m) of the work, `v` times less than that of `1f1b`, for `v` times the
messages. The microbatches go in groups; a group passes a chunk before the next chunk takes it.
With g the size of a group, rank `r` warms up with min((v - 1) g + 2 (p - 1 - r), v m) forwards
and then runs a forward and a backward in turn, so it holds at most one (stage, microbatch) more than that.

Where this differs: the paper needs m to be a multiple of p, and then g = p. Here there are
max(1, m // p) groups of m microbatches as even as can be, the larger ones first. So for m >= p no group is
smaller than p, which would stall the pipeline, and the bubble is that of the formula for any m. Where
`torch.distributed.pipelining` takes m (its groups must be equal), the order is the same as there.

p = 2, m = 4, v = 2:

    rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.schedule.schedule import Action, Schedule, loop


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """`chunks` stages a rank, one after the other.

    >>> print(*interleaved_1f1b(ranks=2, microbatches=3).ranks[1])
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
    """
    groups = group(microbatches, ranks)
    forwards = [(chunk, i) for members in groups for chunk in range(chunks) for i in members]
    backwards = [(chunk, i) for members in groups for chunk in reversed(range(chunks)) for i in members]
    rows = []
    for rank in range(ranks):
        warmup = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forwards))
        actions = list(_actions(rank, ranks, "F", forwards))
        row = actions[:warmup]
        for number, backward in enumerate(_actions(rank, ranks, "B", backwards), start=warmup):
            row.extend((*actions[number : number + 1], backward))
        rows.append(tuple(row))
    return Schedule("interleaved_1f1b", tuple(rows), loop(ranks, chunks))


def group(microbatches: int, ranks: int) -> list[range]:
    """The microbatches in groups of at least `ranks` (or one group), the larger ones first.

    >>> group(11, 4)
    [range(0, 6), range(6, 11)]
    """
    number = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, number)
    ends = [size * (k + 1) + min(k + 1, larger) for k in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _actions(rank: int, ranks: int, kind: str, order: Iterable[tuple[int, int]]) -> Iterable[Action]:
    return (Action(chunk * ranks + rank, kind, microbatch) for chunk, microbatch in order)
