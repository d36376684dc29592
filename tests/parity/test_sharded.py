"""Replicas share parameters, by FSDP2; see `sharded.py`."""

from __future__ import annotations

import os
from pathlib import Path

from tests.launching import run_ranks

from .jobs import ROOT
from .sharded import CHECKS

JOB = Path(__file__).parent / "sharded.py"


def test_replicas_share_parameters(tmp_path: Path):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = run_ranks(
        4, JOB, [str(tmp_path), *CHECKS], env={"PYTHONPATH": path}, timeout=400, warm=True
    ).check()
    for name in CHECKS:
        assert done.stdout.count(f"{name}: passed") == 4
