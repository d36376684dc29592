"""Replicas share parameters, by FSDP2; see `sharded.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import some_of

from .jobs import Layout, pass_layouts
from .sharded import CHECKS


@pytest.mark.parametrize("layouts", some_of(3, [(4, 1, {}, [*CHECKS])]), ids=["some", "all"])
def test_replicas_share_parameters(layouts: list[Layout], tmp_path: Path):
    pass_layouts("sharded.py", layouts, tmp_path)
