"""Units move to other ranks between steps; see `rebalanced.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import FOLDER, PATHS, pass_checks
from .rebalanced import CHECKS

ENDS = "an_attribute_that_stays_ends_the_job"
HERE = [name for name in CHECKS if name != ENDS]
REPLICAS = [
    "training_goes_on_to_the_last_bit",
    "gradients_go_with_their_weights",
    "replicas_move_together",
    "a_replica_that_trains_faster_waits_for_the_slowest",
]
FOUR = ["four_partitions"]
ALSO = [*REPLICAS[2:], *FOUR]


@pytest.mark.timeout(600)
def test_units_move(tmp_path: Path):
    pass_checks("rebalanced.py", [name for name in HERE if name not in ALSO], 2, "--folder", str(tmp_path))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("checks", some_of(2, [REPLICAS, FOUR]), ids=["some", "all"])
def test_units_move_in_larger_jobs(checks: list[list[str]], tmp_path: Path):
    for names in checks:
        pass_checks("rebalanced.py", names, 4, "--folder", str(tmp_path))


def test_what_cannot_move_ends_the_job():
    job = run_ranks(2, FOLDER / "rebalanced.py", [ENDS], env=PATHS, warm=True)
    assert job.returncode != 0
    assert "3 keeps its attribute calls, which stays on its rank" in job.stderr, job.stderr
