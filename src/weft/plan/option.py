"""An option of the search: a schedule with its numbers, and units on its stages.

option  ->  rank of each stage  ->  cost of each stage  ->  actions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft import schedule
from weft.schedule import Schedule
from weft.schedule.table import CHUNKS, KINDS, having
from weft.simulate import Edge, Links, StageCost


@dataclass(frozen=True)
class Option:
    """A schedule that could be chosen.

    Attributes:
        schedule: Its name, as `weft.schedule.make` takes it.
        chunks: How many stages a rank has, where that is free.
        active: How many microbatches a rank may hold, where that is free.
        recompute: Whether activations are computed anew in the backward pass instead of kept.
        like: For "list": the schedule whose stages it takes, or "v": a V whose turn is one stage (see `turn`).
        splits: For "list": whether backward passes may be I and W.
        text: For "file": the CSV text.
    """

    schedule: str
    chunks: int | None = None
    active: int | None = None
    recompute: bool = False
    like: str | None = None
    splits: bool = False
    text: str | None = None

    def __str__(self) -> str:
        parts = [self.schedule if self.like is None else f"{self.schedule} on {self.like}"]
        parts += [f"{self.chunks} chunks"] if self.chunks is not None else []
        parts += [f"{self.active} active"] if self.active is not None else []
        parts += ["I and W"] if self.splits else []
        parts += ["recompute"] if self.recompute else []
        return ", ".join(parts)

    def layout(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        if self.text is not None:
            return schedule.from_csv(self.text).rank_of_stage
        if self.like == "v":
            return (*range(ranks), *range(ranks - 2, -1, -1))
        return schedule.rank_of_stage(self.like or self.schedule, ranks, self.chunks)

    def actions(
        self,
        ranks: int,
        microbatches: int,
        stages: Sequence[StageCost],
        links: Links,
        activation_bytes: Sequence[int] | None,
        rank_of_stage: Sequence[int] = (),
    ) -> Schedule:
        """The action lists, for stages that cost so much and what each rank may keep of activations.

        `rank_of_stage` is for "list", which takes any stages; those of `layout` if not given.
        """
        if self.like is None:
            return self.pattern(ranks, microbatches)
        layout = tuple(rank_of_stage) or self.layout(ranks)
        costs = [
            schedule.ListCost(
                rank=rank,
                forward_s=stage.forward_s,
                backward_s=stage.input_s if self.splits else stage.backward_s,
                weight_s=stage.weight_s if self.splits else None,
                activation_bytes=max(stage.activation_bytes, stage.weight_bytes * self.splits),
                transfer_s=_transfer_s(links, rank, after, stage),
                whole_s=stage.backward_s if self.splits else None,
            )
            for rank, after, stage in zip(layout, (*layout[1:], layout[-1]), stages, strict=True)
        ]
        return schedule.make("list", ranks, microbatches, costs=costs, memory_bytes=activation_bytes)

    def pattern(self, ranks: int, microbatches: int) -> Schedule:
        """The action lists of a schedule that does not depend on costs."""
        return schedule.make(
            self.schedule, ranks, microbatches, active=self.active, chunks=self.chunks, text=self.text
        )


def _transfer_s(links: Links, rank: int, after: int, stage: StageCost) -> float:
    """The seconds that a stage's result takes to the rank of the next stage."""
    if rank == after:
        return 0.0
    return 2 * links.overhead_s + links.between(rank, after).transfer_s(stage.forward_bytes)


@dataclass(frozen=True)
class Placed:
    """Units on stages.

    Attributes:
        stages: What each stage costs.
        edges: Tensors that skip stages.
        placement: Whatever the caller wants to have back.
        rank_of_stage: The rank of each stage, where it is not what was asked for: units that must lie together
            bring every microbatch back to a rank. Only "list" takes such stages.
        revisits: Whether microbatches come back to a stage that they have left.
    """

    stages: tuple[StageCost, ...]
    edges: tuple[Edge, ...] = ()
    placement: Any = None
    rank_of_stage: tuple[int, ...] = ()
    revisits: bool = False


def options(ranks: int, microbatches: int) -> list[Option]:
    """All that is tried for so many ranks and microbatches."""
    found = [
        Option(name, chunks=chunks)
        for name in CHUNKS
        for chunks in ((2, 3, 4) if KINDS[name].free_chunks else (None,))
    ]
    found += [
        Option("list", like=like, chunks=chunks, splits=splits)
        for like, chunks in (("1f1b", None), ("v", None), ("interleaved_1f1b", 2))
        for splits in (False, True)
        if like != "v" or ranks > 1
    ]
    found += [
        Option(name, active=active)
        for name in having(lambda kind: kind.limited)
        for active in _fewer(ranks, microbatches)
    ]
    return found + [replace(option, recompute=True) for option in found]


def _fewer(ranks: int, microbatches: int) -> list[int]:
    """Limits on active microbatches: halves of what the first rank holds, down to 1.

    >>> _fewer(8, 32), _fewer(8, 3), _fewer(1, 4)
    ([4, 2, 1], [1], [])
    """
    held = min(ranks, microbatches)
    return [held >> shift for shift in range(1, held.bit_length())]
