"""The order of a schedule's actions for one rank, as an executor needs it. It knows no threads, so an executor of
any kind can take it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.schedule.schedule import Action, in_flight

LAST = 1 << 59
"""The position of what the list does not name: behind everything that the list does."""


@dataclass(frozen=True)
class Order:
    """The order of a schedule's actions for one rank, as an executor needs it.

    ``position``: by (phase, stage, microbatch), with "B" for an I too; ``limit``: the most (stage, microbatch) in
    flight; ``first``: the rank's first stage; ``later``: the (stage, microbatch) whose backward pass is I and W;
    ``bounded``: no F begins before the B, I and W that the list names before it, so no more is held than at that point
    of the list.
    """

    position: Mapping[tuple[str, int, int], int]
    limit: int
    first: int = 0
    later: frozenset[tuple[int, int]] = frozenset()
    bounded: bool = False

    @classmethod
    def of(
        cls, actions: Sequence[Action], limit: int, revisited: bool = False, ahead: int | None = 0
    ) -> Order:
        """From one rank's ``actions``; at most ``limit`` in flight, less where the list holds less.

        ``ahead``: how many more than the list holds may be in flight, started while the rank would wait; None: never
        more than the list holds at that point, however unequal its stages.

        ``revisited``: microbatches come back to partitions that they left, which the list does not know. What it
        holds in flight would keep the other ranks waiting then, so only ``limit`` counts.
        """
        position: dict[tuple[str, int, int], int] = {}
        for number, (stage, kind, microbatch) in enumerate(actions):
            position.setdefault(("B" if kind == "I" else kind, stage, microbatch), number)
        return cls(
            position,
            max(1, limit if revisited else min(limit, in_flight(actions) + (ahead or 0))),
            min((action.stage for action in actions), default=0),
            frozenset((action.stage, action.microbatch) for action in actions if action.kind == "W"),
            ahead is None and not revisited,
        )

    def before_forward(self) -> list[tuple[int, tuple[str, int, int]]]:
        """Position and (phase, stage, microbatch) of what an F waits for where the list names it before."""
        return sorted((at, what) for what, at in self.position.items() if self.bounded and what[0] != "F")

    @cached_property
    def _backward(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By (stage, microbatch), whose backward pass the list has next."""
        found = [
            what[1:] for what, _ in sorted(self.position.items(), key=lambda one: one[1]) if what[0] == "B"
        ]
        return dict(itertools.pairwise(found))

    def next_backward(self, stage: int, microbatch: int) -> tuple[int, int] | None:
        """The (stage, microbatch) whose backward pass comes after this one's; None at the end, or if unknown."""
        return self._backward.get((stage, microbatch))

    def waits(self, stage: int, microbatch: int) -> bool:
        """True if the rank does anything between the forward and the backward pass of a microbatch."""
        forward, backward = (self.position.get((kind, stage, microbatch), LAST) for kind in "FB")
        return backward - forward > 1

    def splits(self, microbatch: int) -> frozenset[int]:
        """The stages in which the backward pass of ``microbatch`` is I and W."""
        return frozenset(stage for stage, index in self.later if index == microbatch)
