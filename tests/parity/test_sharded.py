"""Replicas share parameters, by FSDP2; see `sharded.py`."""

from __future__ import annotations

from pathlib import Path

from .jobs import pass_checks
from .sharded import CHECKS


def test_replicas_share_parameters(tmp_path: Path):
    pass_checks("sharded.py", CHECKS, 4, "--folder", str(tmp_path))
