"""Objects between ranks, the scaler, BatchNorm over replicas, large batches; see `together.py`."""

from __future__ import annotations

import pytest

from .jobs import pass_checks
from .together import CHECKS

ALONE = [name for name in CHECKS if "batch_norm" not in name and "objects" not in name]
REPLICAS = [name for name in CHECKS if "batch_norm" in name or "scaler" in name]


@pytest.mark.parametrize(
    ("ranks", "partitions", "checks"),
    [(4, 2, list(CHECKS)), (2, 2, ALONE), (2, 1, REPLICAS)],
    ids=["two pipelines of two", "one pipeline", "two replicas"],
)
def test_together(ranks: int, partitions: int, checks: list[str]):
    pass_checks("together.py", checks, ranks, "--partitions", str(partitions))
