"""What one rank alone loads or sets between steps, and several optimizers; see `between_steps.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in, some_of

from .between_steps import AFTER, CHECKS
from .jobs import FOLDER, PATHS, pass_checks

HERE = [name for name in CHECKS if not name.startswith("ends_the_job")]
"""An error that one rank catches leaves copies of its pipeline waiting for it: two ranks only."""
LAYOUTS = [(2, HERE), (4, [name for name in HERE if not name.startswith("after_a_step")])]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(8, LAYOUTS), ids=["some", "all"])
def test_between_steps(layouts: list[tuple[int, list[str]]], tmp_path: Path):
    for ranks, checks in layouts:
        pass_checks("between_steps.py", checks, ranks, "--folder", str(tmp_path))


@pytest.mark.parametrize("what", one_in(4, AFTER))
def test_a_difference_ends_the_job(what: str):
    job = run_ranks(4, FOLDER / "between_steps.py", [f"ends_the_job[{what}]"], env=PATHS, warm=True)
    assert job.returncode != 0
    first = next(line for line in job.stderr.splitlines() if line.startswith("weft: rank"))
    assert "DivergenceError" in first and AFTER[what][1].split(" is ")[0] in first, job.stderr
