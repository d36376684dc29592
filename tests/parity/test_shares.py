"""Replicas share an optimizer's state; see `shares.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import run_ranks

from .jobs import ROOT
from .shares import CHECKS

JOB = Path(__file__).parent / "shares.py"
ELSEWHERE = ["optimizers_compute_the_same_with_half_the_state", "checkpoints_go_to_other_layouts"]
LAYOUTS = [
    (4, 2, list(CHECKS)),
    (2, 1, [name for name in CHECKS if "without" not in name]),
    (1, 1, ELSEWHERE[1:]),
]


@pytest.mark.timeout(1200)
def test_replicas_share_states(tmp_path: Path):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    for ranks, partitions, checks in LAYOUTS:
        arguments = [str(tmp_path), "--partitions", str(partitions), *checks]
        done = run_ranks(ranks, JOB, arguments, env={"PYTHONPATH": path}, timeout=400, warm=True).check()
        for name in checks:
            assert done.stdout.count(f"{name}: passed") == ranks
