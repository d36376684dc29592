"""The number of microbatches that fit where nothing overlaps."""

from __future__ import annotations

from weft.plan.measured.microbatches import Line
from weft.plan.measured.resident import Resident, fewest


def test_microbatches_fit_the_fullest_rank() -> None:
    """The others would do with fewer: one has room for all samples at once, one for half of them."""
    ranks = [Resident(8, 100.0, Line(0.0, 10.0), limit) for limit in (1000.0, 125.0, 150.0)]
    number, why, fits = fewest(ranks)
    assert (number, fits) == (4, True)
    assert "a rank takes 120 B of 125 B" in why
    assert [fewest([rank])[0] for rank in ranks] == [1, 4, 2]
