"""The number of microbatches that fit where nothing overlaps: the fewest, because each of them costs something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from weft.plan.measured.microbatches import Line, numbers
from weft.units import format_bytes

FEW = 2
"""Samples that a microbatch has at least, where the mini-batch has so many: BatchNorm refuses a single one."""


def with_several(samples: int, uneven: bool = False) -> list[int]:
    """The numbers of microbatches to try, ascending; each microbatch has `FEW` samples or more.

    >>> with_several(8), with_several(3), with_several(1)
    ([1, 2, 4], [1], [1])
    """
    return [one for one in numbers(samples, samples, uneven) if one == 1 or samples // one >= FEW]


@dataclass(frozen=True)
class Resident:
    """The memory of a step on one rank.

    Attributes:
        samples: Of its mini-batch.
        lasting_bytes: Parameters, gradients, the optimizer's states.
        kept_bytes: What one microbatch keeps for its backward pass, by its samples.
        limit_bytes: What may be taken.
    """

    samples: int
    lasting_bytes: float
    kept_bytes: Line
    limit_bytes: float

    def needs(self, microbatches: int) -> float:
        """Bytes of a step that is cut into so many.

        >>> Resident(8, 100.0, Line(10.0, 5.0), 200.0).needs(2)
        130.0
        """
        return self.lasting_bytes + self.kept_bytes.at(math.ceil(self.samples / microbatches))

    def to_record(self) -> list[Any]:
        """For other ranks, as JSON has it."""
        return [
            self.samples, self.lasting_bytes, self.kept_bytes.fixed, self.kept_bytes.each, self.limit_bytes,
        ]  # fmt: skip

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> Resident:
        """Of another rank."""
        samples, lasting, fixed, each, limit = record
        return cls(int(samples), float(lasting), Line(float(fixed), float(each)), float(limit))


def fewest(ranks: Sequence[Resident], uneven: bool = False) -> tuple[int, str, bool]:
    """The fewest microbatches that fit on each of the ranks, the reason, and whether they do fit.

    All ranks get the same number. Where none fits, it is the largest that there is.

    >>> fewest([Resident(8, 100.0, Line(0.0, 10.0), 130.0)])
    (4, 'microbatches: 4 of 2 samples, the fewest that fit: a rank takes 120 B of 130 B (2: 140 B, 1: 180 B)', True)
    """
    samples = reduce(math.gcd, (rank.samples for rank in ranks))
    tried = with_several(samples, uneven)
    fullest = {
        number: max(ranks, key=lambda rank, number=number: rank.needs(number) / rank.limit_bytes)  # type: ignore[misc]
        for number in tried
    }
    fitting = [number for number in tried if fullest[number].needs(number) <= fullest[number].limit_bytes]
    number = fitting[0] if fitting else tried[-1]
    rank = fullest[number]
    more = ", ".join(
        f"{one}: {format_bytes(fullest[one].needs(one))}" for one in reversed(tried) if one < number
    )
    why = "the fewest that fit" if fitting else "which is too much all the same"
    return (
        number,
        f"microbatches: {number} of {math.ceil(rank.samples / number)} samples, {why}: a rank takes "
        f"{format_bytes(rank.needs(number))} of {format_bytes(rank.limit_bytes)}{f' ({more})' if more else ''}",
        bool(fitting),
    )
