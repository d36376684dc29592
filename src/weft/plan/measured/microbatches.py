"""The number of microbatches: the one whose simulated step takes the least time.

More microbatches fill a pipeline better: with p stages and m microbatches a rank idles (p - 1) / (m + p - 1) of an even
step. But a microbatch costs something however small it is (calls, kernels that do not fill a device, threads). So what
one of n samples takes is measured at two sizes, and

    cost(n) = fixed + each * n        step(m) = the simulation of m microbatches that cost(B / m)

for a mini-batch of B samples.

Where nothing overlaps it is the number that fits: the fewest, because each of them costs something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from weft.units import format_bytes

NEAR = 0.02
"""Steps that are longer than the quickest one by less than this part of it count as equal: costs are not surer."""
APART = 1.4
"""Each number that is tried is at least so many times the one before."""
MOST = 64
"""Numbers above this for each partition are not tried: the bubble is under 2 % there."""
FINER = 4
"""The second size that is measured is smaller than the first one by this."""


def numbers(samples: int, partitions: int, uneven: bool = False) -> list[int]:
    """The numbers of microbatches to try for a mini-batch of so many samples, ascending.

    They divide the samples, unless microbatches may be `uneven`.

    >>> numbers(48, partitions=2), numbers(7, partitions=2), numbers(7, partitions=2, uneven=True)
    ([1, 2, 3, 6, 12, 24, 48], [1, 7], [1, 2, 3, 5, 7])
    """
    found = [1]
    for number in range(2, min(samples, MOST * partitions) + 1):
        if (uneven or samples % number == 0) and number >= APART * found[-1]:
            found.append(number)
    return found


def to_measure(tried: Sequence[int], partitions: int) -> list[int]:
    """The numbers to measure a microbatch for: one, or two if there are two.

    The larger of their microbatches is no larger than those of the first number that fills the pipeline, where there is
    such a number: what the model keeps for it fits where a step fits.

    >>> to_measure([1, 2, 4, 8, 16, 32], partitions=4), to_measure([1, 3], partitions=4), to_measure([1], partitions=4)
    ([4, 16], [3, 1], [1])
    """
    filling = next((number for number in tried if number >= partitions), tried[-1])
    finer = [number for number in tried if number > filling]
    other = next((number for number in finer if number >= FINER * filling), max(finer, default=0))
    if other:
        return [filling, other]
    return [filling, *(number for number in tried[-2:] if number < filling)]


@dataclass(frozen=True)
class Line:
    """The cost of a microbatch by its samples; neither part is negative.

    >>> Line.through({8: 10.0, 2: 4.0})
    Line(fixed=2.0, each=1.0)
    >>> Line.through({8: 10.0, 2: 2.0}), Line.through({8: 4.0, 2: 5.0}), Line.through({8: 4.0})
    (Line(fixed=0.0, each=1.235...), Line(fixed=4.5, each=0.0), Line(fixed=0.0, each=0.5))
    """

    fixed: float
    each: float

    @classmethod
    def through(cls, costs: Mapping[int, float]) -> Line:
        """The line nearest to costs by numbers of samples; through the origin, if there is one cost only."""
        count = len(costs)
        mean_n, mean = sum(costs) / count, sum(costs.values()) / count
        spread = sum((n - mean_n) ** 2 for n in costs)
        if spread:
            each = sum((n - mean_n) * (cost - mean) for n, cost in costs.items()) / spread
            if each <= 0:
                return cls(mean, 0.0)
            if mean >= each * mean_n:
                return cls(mean - each * mean_n, each)
        return cls(0.0, sum(n * cost for n, cost in costs.items()) / sum(n * n for n in costs))

    def at(self, samples: float) -> float:
        """The cost of a microbatch of so many samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Judged:
    """A number of microbatches with what its simulated step takes.

    Attributes:
        microbatches: The number.
        step_s: The step, in seconds.
        peak_bytes: What the fullest rank needs.
        fault: Why it falls out; empty if it does not.
    """

    microbatches: int
    step_s: float = 0.0
    peak_bytes: int = 0
    fault: str = ""


def judge(microbatches: int, step_s: float, peak_bytes: Iterable[int], limit_bytes: float | None) -> Judged:
    """The verdict on a number: it falls out where the fullest rank needs more than `limit_bytes`.

    >>> judge(4, 0.1, [2 << 30, 1 << 30], limit_bytes=1 << 30).fault
    'a rank needs 2 GiB of 1 GiB'
    """
    peak = max(peak_bytes)
    full = limit_bytes is not None and peak > limit_bytes
    fault = f"a rank needs {format_bytes(peak)} of {format_bytes(limit_bytes or 0)}" if full else ""
    return Judged(microbatches, step_s, peak, fault)


def quickest(found: Sequence[Judged]) -> Judged | None:
    """The number whose step is the quickest; the least number of those that are within `NEAR` of it.

    Where all fall out: the one that needs least memory. None if none could be simulated.

    >>> quickest([Judged(2, 1.3), Judged(4, 1.01), Judged(8, 1.0), Judged(16, 1.2)])
    Judged(microbatches=4, ...)
    """
    fitting = [one for one in found if not one.fault]
    if fitting:
        least_s = min(one.step_s for one in fitting)
        return next(one for one in fitting if one.step_s <= (1 + NEAR) * least_s)
    return min((one for one in found if one.peak_bytes), key=lambda one: one.peak_bytes, default=None)


def explain(best: Judged, found: Sequence[Judged], samples: int, cost: Line, measured: Sequence[int]) -> str:
    """The text about the number and why it was chosen, in a sentence or two.

    >>> print(explain(Judged(2, 0.01), [Judged(1, 0.012), Judged(2, 0.01)], 8, Line(0.001, 0.002), [2, 1]))
    microbatches: 2 of 4 samples, a step of 10.0 ms by simulation (1: 12.0 ms). One of n samples takes 1.0 ms + n * 2 ms
    on one rank, measured with 2 and 1
    """
    size = samples / best.microbatches
    others = [
        f"{one.microbatches}: {one.fault or f'{one.step_s * 1e3:.1f} ms'}"
        for one in found
        if one.microbatches != best.microbatches
    ]
    beside = f" ({', '.join(others)})" if others else ""
    return (
        f"microbatches: {best.microbatches} of {size:g} samples, a step of {best.step_s * 1e3:.1f} ms by simulation"
        f"{beside}. One of n samples takes {cost.fixed * 1e3:.1f} ms + n * {cost.each * 1e3:.3g} ms on one rank, "
        f"measured with {' and '.join(map(str, measured))}"
    )


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
