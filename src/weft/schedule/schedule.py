"""A schedule as a value: who runs what, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.schedule.action import Action


@dataclass(frozen=True)
class Schedule:
    """For each rank its actions in order, sends and receives left out; and the rank of each stage.

    Nothing is checked here: `legal.check` does that.

    >>> step = Schedule("mine", ((Action(0, "F", 0), Action(0, "B", 0)),), rank_of_stage=(0,))
    >>> step.stages, step.microbatches
    (1, 1)
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    rank_of_stage: tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.rank_of_stage)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches of the step: one more than the highest number among the actions."""
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stages over the ranks in turn: stage `s` is on rank `s` modulo `ranks`.

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: the first rank has the first stage and the last one.

    >>> vee(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))
