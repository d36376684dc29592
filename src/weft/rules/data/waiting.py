"""The time that a run waits for data, and what its loaders do meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from weft.analysis.analysis import Analysis


def data_wait(analysis: Analysis, ranks: Sequence[int]) -> tuple[float, float, int]:
    """The share of a usual step spent waiting for data, the seconds, and the one of the ranks on which it is most."""
    found = [
        (parts.data / parts.total, parts.data, rank)
        for rank, parts in analysis.typical.items()
        if parts.total > 0 and rank in ranks
    ]
    return max(found, key=lambda each: each[:2], default=(0.0, 0.0, ranks[0] if ranks else 0))


def own_work(analysis: Analysis, rank: int) -> float:
    """The share of the wait for data in which the rank's own thread worked: it prepared the data itself.

    What it did between steps counts, but for the optimizer.
    """
    steps = analysis.steps(rank)
    waited_s = sum(step.data_s for step in steps)
    worked_s = sum(step.between_cpu_s - step.optimizer_s for step in steps)
    return max(0.0, worked_s) / waited_s if waited_s else 0.0
