"""Replicas of a pipeline share parameters; see `shared_parts.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.long import some_of

from .jobs import Layout, pass_checks, pass_layouts
from .shared_parts import CHECKS

ENDS = ["shares_that_a_script_replaced_are_refused"]
"""After these a job cannot go on."""
ALONE = ["scripts_in_16_bits"]
"""Sets the number of sharers itself."""
ALL = [name for name in CHECKS if name not in [*ENDS, *ALONE]]
SAVES = ["saves_go_to_other_layouts"]
TWO = {"sharded_data_parallel_degree": 2}
LAYOUTS: list[Layout] = [
    (4, 2, TWO, ALL),
    (1, 1, {}, SAVES),
    (2, 1, TWO, SAVES),
    (2, 2, {}, SAVES),
    (4, 2, {}, SAVES),
    (8, 2, TWO, ["norms_are_those_of_the_whole_model"]),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(4, LAYOUTS), ids=["some", "all"])
def test_replicas_of_a_pipeline_share_parameters(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("shared_parts.py", layouts, tmp_path)


def test_scripts_of_the_original_share_parameters() -> None:
    pass_checks("shared_parts.py", ALONE, 4, "--partitions", "2")


@pytest.mark.parametrize("check", ENDS)
def test_what_would_differ_is_refused(check: str) -> None:
    pass_checks("shared_parts.py", [check], 4, "--partitions", "2", env={"WEFT_SET": json.dumps(TWO)})
