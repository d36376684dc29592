"""Measures of a series that a few wild values do not move: what rules judge step times and memory by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from weft.errors import UsageError

T = TypeVar("T")

MOST_POINTS = 300
"""The slope of a longer series is that of so many of its points: all pairs of them are looked at."""


class Trend(NamedTuple):
    """A straight line through a series: ``at_start + slope * x``."""

    slope: float
    at_start: float

    def at(self, position: float) -> float:
        """The line's value there."""
        return self.at_start + self.slope * position


def median(values: Sequence[float]) -> float:
    """The middle of the finite values; nan if there is none."""
    finite = _finite(values)
    return statistics.median(finite) if finite else math.nan


def deviation(values: Sequence[float]) -> float:
    """The median distance from the median (MAD), in the unit of the values; nan if there is none.

    For normal noise the standard deviation is 1.4826 times that.

    >>> deviation([1, 2, 3, 4, 1000])
    1
    """
    middle = median(values)
    return median([abs(value - middle) for value in _finite(values)])


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the finite values lies, linear between neighbours; nan if there is none.

    >>> quantile([10, 20, 30, 40, 50], 0.9)
    46.0
    """
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"a quantile is asked for at {share}, it must be a share from 0 to 1")
    ordered = sorted(_finite(values))
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def outliers(values: Sequence[float], times: float = 6.0, least: float = 0.0) -> list[int]:
    """The positions of values above the median by more than `times` the deviation, ascending.

    Args:
        values: The series.
        times: How many deviations.
        least: They are above the median by more than this share of it, too. A series without noise has the
            deviation 0, so that without a share any difference counts.

    >>> outliers([10.0, 10.1, 9.9, 10.0, 50.0, 10.1])
    [4]
    """
    middle, apart = median(values), deviation(values)
    limit = middle + max(times * apart, least * abs(middle))
    return [position for position, value in enumerate(values) if value > limit]


def trend(values: Sequence[float], positions: Sequence[float] | None = None) -> Trend:
    """The line of Theil and Sen: the median of the slopes of all pairs, through the median of what is left.

    Up to 29 % of the values may be anything (Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau",
    Journal of the American Statistical Association 63, 1968). Nan where there are not two positions with a value.

    Args:
        values: The series.
        positions: Where each value stands, 0, 1, 2, ... if not given.

    >>> trend([5.0, 7.0, 9.0, 400.0, 13.0])
    Trend(slope=2.0, at_start=5.0)
    """
    if positions is not None and len(positions) != len(values):
        raise UsageError(
            f"a series has {len(values)} values at {len(positions)} positions, give one for each"
        )
    places = range(len(values)) if positions is None else positions
    points = [(x, y) for x, y in zip(places, values, strict=True) if math.isfinite(x) and math.isfinite(y)]
    points = thinned(points, MOST_POINTS)
    slopes = [
        (y2 - y1) / (x2 - x1)
        for number, (x1, y1) in enumerate(points)
        for x2, y2 in points[number + 1 :]
        if x1 != x2
    ]
    if not slopes:
        return Trend(math.nan, math.nan)
    slope = statistics.median(slopes)
    return Trend(slope, statistics.median([y - slope * x for x, y in points]))


def thinned(values: Sequence[T], most: int) -> list[T]:
    """At most so many of the values, evenly spread, with the first and the last."""
    if most < 2 or len(values) <= most:
        return list(values[:most]) if most < 2 else list(values)
    return [values[number * (len(values) - 1) // (most - 1)] for number in range(most)]


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
