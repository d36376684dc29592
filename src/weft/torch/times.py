"""One time for each thing that was measured several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def typical(passes: Sequence[Mapping[Any, tuple[float, ...]]]) -> dict[Any, tuple[float, ...]]:
    """The smallest of each key's times, scaled so that all together are the median of the passes' sums.

    >>> typical([{"a": (1.0, 2.0), "b": (3.0, 3.0)}, {"a": (2.0, 1.0), "b": (2.0, 4.0)}])
    {'a': (1.2857142857142858, 1.2857142857142858), 'b': (2.5714285714285716, 3.8571428571428577)}
    """
    least = {key: tuple(map(min, zip(*(one[key] for one in passes), strict=True))) for key in passes[0]}
    smallest = sum(map(sum, least.values()))
    scale = median(sum(map(sum, one.values())) for one in passes) / smallest if smallest else 1.0
    return {key: tuple(scale * time_s for time_s in times) for key, times in least.items()}
