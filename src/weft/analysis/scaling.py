"""Runs of one job on different numbers of ranks: what more ranks gave, and where the rest went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.analysis.analysis import Analysis
from weft.analysis.measured import samples_of
from weft.analysis.parts import Parts
from weft.errors import UsageError


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        name: The run's.
        samples_s: Samples a second of all ranks together.
        linear: What it would be if each rank did as much as one of the smallest run.
        efficiency: The one divided by the other.
        lost: For each part the share of the ranks' time that it takes more, for each sample, than in the smallest run;
            negative if less. They add up to what the efficiency lacks to 1.
    """

    name: str
    ranks: int
    step_s: float
    samples_s: float
    linear: float
    efficiency: float
    lost: Mapping[str, float]

    @property
    def largest(self) -> str:
        """The part that most of the loss went into; empty if nothing was lost."""
        part = max(self.lost, key=lambda name: self.lost[name])
        return part if self.lost[part] > 0.0 else ""


class Fit(NamedTuple):
    """Rank-seconds for a sample on n ranks: ``alone + shared * n``."""

    alone: float
    shared: float


@dataclass(frozen=True)
class Scaling:
    """Runs by their number of ranks.

    Attributes:
        rows: The smallest first.
        fit: Of all rows.
        limit: The number of ranks from which another one gives less than half of what one rank gave in the smallest
            run; nothing if no such number shows.
    """

    rows: tuple[Row, ...]
    fit: Fit
    limit: int | None

    @property
    def text(self) -> str:
        """A sentence about the largest run, and one about the limit."""
        last = self.rows[-1]
        text = (
            f"{last.ranks} ranks do {last.samples_s:.4g} samples a second, {last.efficiency:.0%} of what "
            f"{last.ranks / self.rows[0].ranks:.3g} times {self.rows[0].ranks} would do"
        )
        if last.largest:
            text += f"; most is lost to {last.largest} ({last.lost[last.largest]:.0%} of the ranks' time)"
        if self.limit is None:
            return text + "."
        return text + f". From {self.limit} ranks on another one gains less than half of its own."


def scale(analyses: Sequence[Analysis]) -> Scaling:
    """Runs side by side.

    On n ranks a sample takes c(n) = n * step / samples rank-seconds, which is what its parts take, so that

        efficiency(n) = c(first) / c(n)        lost(part) = (c_part(n) - c_part(first)) / c(n)

    and the lost shares add up to 1 - efficiency. The limit comes from the line c(n) = a + b n through all runs (least
    squares). The throughput is n / (a + b n), and the n-th rank adds a / (a + b n)^2 to it. That is half of what a rank
    of the smallest run does, 1 / (a + b first), at

        n = (sqrt(2 a (a + b first)) - a) / b

    Raises:
        UsageError: If there are less than two numbers of ranks, or a run has no usual step or does not say its samples.
    """
    _check(analyses)
    ordered = sorted(analyses, key=lambda each: len(each.ranks))
    costs = [_costs(each) for each in ordered]
    first, base = len(ordered[0].ranks), sum(costs[0].values())
    rows = []
    for analysis, own in zip(ordered, costs, strict=True):
        ranks, cost = len(analysis.ranks), sum(own.values())
        rows.append(
            Row(
                analysis.run.name, ranks, analysis.step_s, ranks / cost, ranks / base, base / cost,
                {part: (own[part] - costs[0][part]) / cost for part in own},
            )
        )  # fmt: skip
    fit = _line([(row.ranks, row.ranks / row.samples_s) for row in rows])
    return Scaling(tuple(rows), fit, limit_of(fit, first))


def limit_of(fit: Fit, first: int) -> int | None:
    """The number of ranks from which another one gives less than half of what one of ``first`` ranks did.

    >>> limit_of(Fit(1.0, 0.1), first=1), limit_of(Fit(1.0, 0.0), first=1), limit_of(Fit(0.0, 1.0), first=2)
    (5, None, 2)
    """
    alone, shared = fit
    if shared <= 1e-9 * abs(alone):
        return None
    if alone <= 0.0:
        return first
    number = (math.sqrt(2.0 * alone * (alone + shared * first)) - alone) / shared
    return max(first, math.ceil(number - 1e-9))


def _check(analyses: Sequence[Analysis]) -> None:
    if len({len(each.ranks) for each in analyses}) < 2:
        counts = ", ".join(f'"{each.run.name}" has {len(each.ranks)}' for each in analyses) or "there is none"
        raise UsageError(
            f"scaling is seen in runs on different numbers of ranks, but of these {counts}: give others"
        )
    for each in analyses:
        if not each.step_s:
            raise UsageError(
                f'the run "{each.run.name}" has no usual step: record more than the first steps, which trace and split '
                "the model"
            )
        if not samples_of(each):
            raise UsageError(
                f'the run "{each.run.name}" does not say how many samples a step has: record it with weft run --report'
            )


def _costs(analysis: Analysis) -> dict[str, float]:
    """For each part the rank-seconds of a sample."""
    samples = samples_of(analysis)
    means = map(statistics.fmean, zip(*analysis.typical.values(), strict=True))
    return {
        part: len(analysis.ranks) * mean / samples for part, mean in zip(Parts._fields, means, strict=True)
    }


def _line(points: Sequence[tuple[int, float]]) -> Fit:
    """The line of least squares."""
    x, y = statistics.fmean(at for at, _ in points), statistics.fmean(value for _, value in points)
    slope = sum((at - x) * (value - y) for at, value in points) / sum((at - x) ** 2 for at, _ in points)
    return Fit(y - slope * x, slope)
