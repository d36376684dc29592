"""The layers of each stage of a pipeline: one answer for the step, the memory and the simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from weft.plan.parallelism.job import Division


@dataclass(frozen=True)
class Part:
    """The part of the model on one rank of a pipeline.

    Attributes:
        place: The rank's place in the row.
        layers: How many layers; not whole where they are cut inside.
        dense: How many of them have no experts, in a model that has.
        embedding: Whether it has the embedding.
        head: Whether it has the head.
    """

    place: int
    layers: float
    dense: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Shares:
    """Whole layers, by stage and by rank.

    Attributes:
        stages: Layers of each stage.
        ranks: Layers of each rank, all its stages together.
        end: The rank that has the last stage, and so the head.
        dense: Layers without experts of each rank, in a model that has experts.
        head: How many layers the head costs as much as.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    end: int
    dense: tuple[int, ...]
    head: float = 0.0

    def part(self, place: int) -> Part:
        """The part of the model on the rank at a place."""
        return Part(place, self.ranks[place], self.dense[place], place == 0, place == self.end)

    def opened(self, place: int) -> float:
        """The number of layers of the rank at a place where layers are cut inside, as weft cuts them to make ranks
        even.

        To the nearest third: attention is a third of a layer's parameters, and the network two thirds. Whole ones where
        a rank has several stages, of which one can make up for another.

        >>> found = shares(8, Division(pipeline=2), 0.6)
        >>> found.ranks, round(found.opened(0), 2), round(found.opened(1), 2)
        ((4, 4), 4.33, 3.67)
        """
        if len(self.stages) != len(self.ranks) or len(self.ranks) == 1:
            return self.ranks[place]
        even = (sum(self.ranks) + self.head) / len(self.ranks) - self.head * (place == self.end)
        return max(0.0, round(3 * even) / 3)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The ranks of which one is the fullest, whatever is counted: the first of those that have as many layers, and
        the ends."""
        kinds = list(zip(self.ranks, self.dense, strict=True))
        first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
        return tuple(self.part(place) for place in sorted({0, self.end, *first.values()}))


def shares(layers: int, division: Division, head: float, dense: int = 0) -> Shares:
    """Layers as evenly as whole ones can lie, with a head on the last stage that costs as much as `head` layers.

    The last stage has fewer for its head if that makes the busiest rank smaller. Where the rest does not divide, the
    first stage is the last to get one more: its rank keeps most microbatches, and has the embedding. So does
    Megatron-LM, in which embedding and head count as a layer each. Where several chunks a rank can all have as many
    layers they do, as there. The first `dense` layers have no experts, and lie where they come to lie.

    >>> shares(8, Division(pipeline=2), 2.0).stages, shares(8, Division(pipeline=2, chunks=2), 0.1).stages
    ((5, 3), (2, 2, 2, 2))
    >>> shares(30, Division(pipeline=8), 0.9).stages
    (3, 4, 4, 4, 4, 4, 4, 3)
    >>> shares(10, Division(pipeline=4, chunks=2, schedule="zbv"), 0.0).ranks
    (2, 3, 3, 2)
    """
    return _shares(layers, division.pipeline, division.chunks, division.schedule == "zbv", head, dense)


@lru_cache(maxsize=4096)
def _shares(layers: int, ranks: int, chunks: int, back: bool, head: float, dense: int) -> Shares:
    stages = ranks * chunks
    if stages == 1 or (chunks > 1 and layers % stages == 0):
        return _on_ranks((layers // stages,) * stages, ranks, back, dense)
    tried = []
    for last in range(-(-layers // stages), -1, -1):
        least, more = divmod(layers - last, stages - 1)
        split = (*(least + (1 <= stage <= more) for stage in range(stages - 1)), last)
        found = _on_ranks(split, ranks, back, dense)
        costs = [*split[:-1], last + head]
        rounds = sum(max(costs[at : at + ranks]) for at in range(0, stages, ranks))
        tried.append((max(*found.ranks, found.ranks[found.end] + head), rounds, found))
    return replace(min(tried, key=lambda one: one[:2])[2], head=head)


def _on_ranks(split: tuple[int, ...], ranks: int, back: bool, dense: int) -> Shares:
    loads, without = [0] * ranks, [0] * ranks
    before = 0
    for stage, own in enumerate(split):
        place = _rank(stage, ranks, back)
        loads[place] += own
        without[place] += min(own, max(0, dense - before))
        before += own
    return Shares(split, tuple(loads), _rank(len(split) - 1, ranks, back), tuple(without))


def _rank(stage: int, ranks: int, back: bool) -> int:
    """Where a stage lies: round and round, or there and back."""
    lap, place = divmod(stage, ranks)
    return ranks - 1 - place if back and lap % 2 else place
