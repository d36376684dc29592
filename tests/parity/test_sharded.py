"""Replicas share parameters, by FSDP2; see `sharded.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import some_of

from .jobs import pass_checks
from .sharded import CHECKS


@pytest.mark.parametrize("layouts", some_of(3, [(4, [*CHECKS])]), ids=["some", "all"])
def test_replicas_share_parameters(layouts: list[tuple[int, list[str]]], tmp_path: Path):
    for ranks, checks in layouts:
        pass_checks("sharded.py", checks, ranks, "--folder", str(tmp_path))
