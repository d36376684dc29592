"""Replicas share an optimizer's state; see `shares.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import some_of

from .jobs import Layout, pass_layouts
from .shares import CHECKS

ELSEWHERE = ["optimizers_compute_the_same_with_half_the_state", "checkpoints_go_to_other_layouts"]
LAYOUTS: list[Layout] = [
    (4, 2, {}, list(CHECKS)),
    (2, 1, {}, [name for name in CHECKS if "without" not in name]),
    (1, 1, {}, ELSEWHERE[1:]),
]


def test_shared_states_are_offloaded(tmp_path: Path):
    """The same checks, masters of 16-bit weights and checkpoints included, with states outside of the device."""
    pass_layouts("shares.py", [(4, 2, {"offload_optimizer": True}, [*CHECKS])], tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_replicas_share_states(layouts: list[Layout], tmp_path: Path):
    pass_layouts("shares.py", layouts, tmp_path)
