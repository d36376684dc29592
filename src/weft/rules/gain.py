"""What a change of the run is expected to save."""

from __future__ import annotations

from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts
from weft.rules.measures import partition_work, share


def gain(analysis: Analysis, change: str) -> float | None:
    """The share of a step that a change of `what_if` saves, from 0 to 1; None if that is not known."""
    if not analysis.step_s:
        return None
    shares = {
        "no transfers": "transfer",
        "no data wait": "data",
        "no reduce": "reduce",
        "no host gaps": "host",
    }
    if change in shares:
        return share(analysis, lambda parts: getattr(parts, shares[change]))
    work = list(partition_work(analysis).values())
    if change == "equal partitions":
        return (max(work) - sum(work) / len(work)) / analysis.step_s
    if change == "microbatches":
        return min(
            (_ends(each) / 2 / each.total for each in analysis.typical.values() if each.total), default=0.0
        )
    return None


def _ends(parts: Parts) -> float:
    return parts.warmup + parts.drain
