"""Units move to other ranks between steps; see `rebalanced.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import pass_checks
from .rebalanced import CHECKS

LAYOUTS = [(2, list(CHECKS))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "checks"), LAYOUTS, ids=["two"])
def test_units_move(ranks: int, checks: list[str], tmp_path: Path):
    pass_checks("rebalanced.py", checks, ranks, "--folder", str(tmp_path))
