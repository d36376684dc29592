"""A schedule as a value: who runs what, in which order; and one thing that a rank does, with its short text form.

`2F0` is stage 2, forward, microbatch 0: the notation of `torch.distributed.pipelining`, so that
schedules can be compared, stored as CSV and printed with the fault marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.errors import FormatError
from weft.untrusted import MOST_RANKS, shown_text, whole

KINDS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward for the inputs only",
    "W": "backward for the weights only",
    "SEND_F": "send the result of a forward to the next stage",
    "RECV_F": "receive the result of the previous stage's forward",
    "SEND_B": "send a gradient to the previous stage",
    "RECV_B": "receive the gradient from the next stage",
}
COMPUTE = ("F", "B", "I", "W")

_TEXT = re.compile(rf"([0-9]+)({'|'.join(KINDS)})([0-9]+)")


class Action(NamedTuple):
    """An action of a rank: one microbatch in one stage.

    >>> str(Action(2, "F", 0)), Action.parse("2F0")
    ('2F0', Action(stage=2, kind='F', microbatch=0))
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise FormatError(
                f'"{shown_text(text)}" is not an action: write stage, kind and microbatch, for example "2F0"; '
                f"the kinds are {', '.join(KINDS)}"
            )
        stage, microbatch = whole(match[1], MOST_RANKS), whole(match[3], MOST_RANKS)
        if stage is None or microbatch is None:
            raise FormatError(
                f'"{shown_text(text)}" is not an action: stages and microbatches are counted from 0 to {MOST_RANKS}'
            )
        return cls(stage, match[2], microbatch)


def in_flight(actions: Iterable[Action], weights: Sequence[int] | None = None) -> int:
    """The most (stage, microbatch) whose forward was run and whose backward (B or W) was not, at any moment.

    Args:
        actions: What one rank does, in order.
        weights: What each stage counts, its activations' bytes for example; 1 if not given.

    >>> actions = [Action.parse(text) for text in ("0F0", "2F0", "2B0", "0F1", "0B0", "0B1")]
    >>> in_flight(actions), in_flight(actions, weights=[10, 0, 5])
    (2, 20)
    """
    held = peak = 0
    for stage, kind, _ in actions:
        if kind == "F":
            held += 1 if weights is None else weights[stage]
            peak = max(peak, held)
        elif kind in ("B", "W"):
            held -= 1 if weights is None else weights[stage]
    return peak


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
