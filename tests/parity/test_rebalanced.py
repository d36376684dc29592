"""Units move to other ranks between steps; see `rebalanced.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import FOLDER, PATHS, pass_checks
from .rebalanced import CHECKS

ENDS = "an_attribute_that_stays_ends_the_job"
FOUR = ["replicas_move_together", "a_replica_that_trains_faster_waits_for_the_slowest", "four_partitions"]
BOTH = ["training_goes_on_to_the_last_bit", "gradients_go_with_their_weights"]
LAYOUTS = [(2, [name for name in CHECKS if name not in (ENDS, *FOUR)]), (4, [*BOTH, *FOUR])]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_units_move(layouts: list[tuple[int, list[str]]], tmp_path: Path):
    for ranks, checks in layouts:
        pass_checks("rebalanced.py", checks, ranks, "--folder", str(tmp_path))


def test_what_cannot_move_ends_the_job():
    job = run_ranks(2, FOLDER / "rebalanced.py", [ENDS], env=PATHS, warm=True)
    assert job.returncode != 0
    assert "3 keeps its attribute calls, which stays on its rank" in job.stderr, job.stderr
