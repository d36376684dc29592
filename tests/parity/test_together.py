"""Objects between ranks, the scaler, BatchNorm over replicas, large batches; see `together.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import run_ranks

from .jobs import ROOT
from .together import CHECKS

JOB = Path(__file__).parent / "together.py"
ALONE = [name for name in CHECKS if "batch_norm" not in name and "objects" not in name]
REPLICAS = [name for name in CHECKS if "batch_norm" in name or "scaler" in name]


@pytest.mark.parametrize(
    ("ranks", "partitions", "checks"),
    [(4, 2, list(CHECKS)), (2, 2, ALONE), (2, 1, REPLICAS)],
    ids=["two pipelines of two", "one pipeline", "two replicas"],
)
def test_together(ranks: int, partitions: int, checks: list[str]):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    arguments = ["--partitions", str(partitions), *checks]
    done = run_ranks(ranks, JOB, arguments, env={"PYTHONPATH": path}, timeout=400, warm=True).check()
    for name in checks:
        assert done.stdout.count(f"{name}: passed") == ranks
