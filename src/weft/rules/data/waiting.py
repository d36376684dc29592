"""How long a run waits for data, and what its loaders do meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from weft.analysis.analysis import Analysis
from weft.rules.measures import mean


def data_wait(analysis: Analysis, ranks: Sequence[int]) -> tuple[float, float, int]:
    """The share of a usual step spent waiting for data, the seconds, and the one of the ranks on which it is most."""
    found = [
        (parts.data / parts.total, parts.data, rank)
        for rank, parts in analysis.typical.items()
        if parts.total > 0 and rank in ranks
    ]
    return max(found, key=lambda each: each[:2], default=(0.0, 0.0, ranks[0] if ranks else 0))


def own_core(analysis: Analysis, rank: int) -> float:
    """The share of a step in which the rank's own thread ran on its core, as far as that is known."""
    return mean(step.cpu_s for step in analysis.steps(rank)) / analysis.step_s if analysis.step_s else 0.0
