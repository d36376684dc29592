"""A V whose turn is one stage: on four ranks 0 1 2 3 2 1 0, with stages of any size.

Every rank but the last has two stages, and what counts for its load is their sum. How large the first one is says how
soon the ranks behind it begin, and how much is left to do at the end, when the gradients come back:

    rank 0   F0 F1 F2 F3 ..          F of a small stage, then the last stage of each microbatch, where its B follows
    rank 1      F0 F1 F2 F3          one stage: no visit for nothing, where a V of equal halves has two in a row
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from weft.errors import PlacementError
from weft.plan.option import Option, Placed
from weft.simulate import Links, simulate

EFFORT = 50_000
"""How many actions are simulated at most to find how large the stages are."""


def turns(costs: Sequence[float], ranks: int, most: int | None = None) -> Iterator[list[int]]:
    """The stage of each unit, for one size of the first stage after the other.

    From the first rank to the last each gets an equal share of what is left, as far as the units allow it, and divides
    it between its two stages as the first rank does. The first stage may be a unit that is larger than a share.

    Args:
        costs: What each unit costs, in program order.
        ranks: How many ranks there are, at least two.
        most: How many sizes are tried at most, evenly spread; all if not given.

    >>> list(turns([1, 1, 1, 1, 1, 1], ranks=2))
    [[0, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2]]
    >>> list(turns([9, 1, 1, 1], ranks=2))
    [[0, 1, 1, 2]]
    """
    before = [0.0, *accumulate(costs)]
    share = before[-1] / ranks
    sizes = [end for end in range(1, len(costs)) if end == 1 or before[end] < share * (1 - 1e-9)]
    if most is not None and len(sizes) > most:
        sizes = sorted({sizes[(2 * number + 1) * len(sizes) // (2 * most)] for number in range(most)})
    for first in sizes:
        stages = _turn(before, ranks, first)
        if stages is not None:
            yield stages


def _turn(before: Sequence[float], ranks: int, first: int) -> list[int] | None:
    """The stages if the first one has `first` units; None if a stage would be empty. `before`: sums of costs."""
    low, high = 0, len(before) - 1
    starts, ends = [0], [high]
    part = before[first] * ranks / (before[-1] or 1.0)
    for rank in range(ranks - 1):
        left = (before[high] - before[low]) / (ranks - rank)
        inner = 2 * (ranks - rank) - 3
        there = first if rank == 0 else nearest(before, before[low] + part * left, low + 1, high - inner - 1)
        back = nearest(before, before[high] - left + before[there] - before[low], there + inner, high - 1)
        if there + inner > high - 1:
            return None
        low, high = there, back
        starts.append(low)
        ends.append(high)
    cuts = [*starts, *reversed(ends[1:])]
    return [sum(unit >= cut for cut in cuts) - 1 for unit in range(len(before) - 1)]


def nearest(before: Sequence[float], wanted: float, least: int, most: int) -> int:
    """The cut from `least` to `most` before which the sum is nearest to `wanted`."""
    at = bisect_left(before, wanted, least, max(least, most))
    if at > least and wanted - before[at - 1] <= before[at] - wanted:
        at -= 1
    return at


def best_turn(
    candidates: Iterable[Placed], ranks: int, microbatches: int, links: Links, splits: bool = True
) -> Placed:
    """The candidate whose simulated step is the shortest, by list scheduling; the first of equal ones.

    Steps of up to four microbatches a rank are simulated.

    Args:
        candidates: Units on the stages of a turn.
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        links: How tensors go from rank to rank.
        splits: Whether backward passes may be I and W.

    Raises:
        PlacementError: If there is no candidate.
    """
    option = Option("list", like="v", splits=splits)
    few, layout = min(microbatches, 4 * ranks), option.layout(ranks)

    def step_s(placed: Placed) -> float:
        made = option.actions(ranks, few, placed.stages, links, None, layout)
        return simulate(made.ranks, made.rank_of_stage, placed.stages, links, edges=placed.edges).step_s

    best = min(candidates, key=step_s, default=None)
    if best is None:
        raise PlacementError(
            f"the units are not enough for {len(layout)} stages, or those that must lie together come to several ranks"
        )
    return best


def tries(ranks: int, microbatches: int) -> int:
    """The number of candidates within `EFFORT`: list scheduling simulates several policies for each."""
    return max(1, EFFORT // (12 * min(microbatches, 4 * ranks) * (2 * ranks - 1)))
