"""How many layers each stage of a pipeline has: one answer for the step, the memory and the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from weft.plan.parallelism.job import Division


@dataclass(frozen=True)
class Part:
    """What one rank of a pipeline has.

    Attributes:
        place: The rank's place in the row.
        layers: How many layers.
        embedding: Whether it has the embedding.
        head: Whether it has the head.
    """

    place: int
    layers: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Shares:
    """Whole layers, by stage and by rank.

    Attributes:
        stages: Layers of each stage.
        ranks: Layers of each rank, all its stages together.
        end: The rank that has the last stage, and so the head.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    end: int

    def part(self, place: int) -> Part:
        """What the rank at a place has."""
        return Part(place, self.ranks[place], place == 0, place == self.end)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The ranks of which one is the fullest, whatever is counted: the first of those that have as many layers, and
        the ends."""
        first = {layers: place for place, layers in reversed(list(enumerate(self.ranks)))}
        return tuple(self.part(place) for place in sorted({0, self.end, *first.values()}))


def shares(layers: int, division: Division, head: float) -> Shares:
    """Layers as evenly as whole ones can lie, with a head on the last stage that costs as much as `head` layers.

    The last stage has fewer for its head if that makes the busiest rank smaller. Where the rest does not divide, the
    first stage is the last to get one more: its rank keeps most microbatches, and has the embedding. So does
    Megatron-LM, in which embedding and head count as a layer each. Where several chunks a rank can all have as many
    layers they do, as there.

    >>> shares(8, Division(pipeline=2), 2.0).stages, shares(8, Division(pipeline=2, chunks=2), 0.1).stages
    ((5, 3), (2, 2, 2, 2))
    >>> shares(30, Division(pipeline=8), 0.9).stages
    (3, 4, 4, 4, 4, 4, 4, 3)
    >>> shares(10, Division(pipeline=4, chunks=2, schedule="zb_v"), 0.0).ranks
    (2, 3, 3, 2)
    """
    return _shares(layers, division.pipeline, division.chunks, division.schedule == "zb_v", head)


@lru_cache(maxsize=4096)
def _shares(layers: int, ranks: int, chunks: int, back: bool, head: float) -> Shares:
    stages = ranks * chunks
    if stages == 1 or (chunks > 1 and layers % stages == 0):
        each = layers // stages
        return Shares((each,) * stages, (each * chunks,) * ranks, _rank(stages - 1, ranks, back))
    tried = []
    end = _rank(stages - 1, ranks, back)
    for last in range(-(-layers // stages), -1, -1):
        least, more = divmod(layers - last, stages - 1)
        split = (*(least + (1 <= stage <= more) for stage in range(stages - 1)), last)
        loads = [0] * ranks
        for stage, own in enumerate(split):
            loads[_rank(stage, ranks, back)] += own
        costs = [*split[:-1], last + head]
        rounds = sum(max(costs[at : at + ranks]) for at in range(0, stages, ranks))
        tried.append((max(*loads, loads[end] + head), rounds, Shares(split, tuple(loads), end)))
    return min(tried, key=lambda one: one[:2])[2]


def _rank(stage: int, ranks: int, back: bool) -> int:
    """Where a stage lies: round and round, or there and back."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if back and lap % 2 else place
