"""Mixtures whose experts ranks share out, with partitions and replicas; see `experts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long import long, some_of

from .experts import CHECKS
from .jobs import pass_checks

ALL = [*CHECKS]
STEPS = "steps_give_the_weights_and_states_of_one_process"
NORMS = "norms_of_all_kinds_are_those_of_the_whole"
LOADS = "a_whole_state_is_loaded_into_parts"
SAVES = "saves_go_to_other_layouts"


Layouts = list[tuple[int, int, int, dict[str, Any], list[str]]]
"""Ranks, partitions, ranks that split tensors, more settings, checks."""
CASES: dict[str, Layouts] = {
    "partitions": [
        (2, 1, 2, {}, ALL), (4, 2, 2, {}, [STEPS, NORMS, SAVES]), (1, 1, 1, {}, [SAVES]), (3, 1, 3, {}, [STEPS]),
    ],
    "copies": [(1, 1, 1, {}, [SAVES]), (4, 1, 2, {}, [STEPS, NORMS, SAVES])],
    "states are shared": [(4, 1, 2, {"shard_optimizer_state": True}, [STEPS, SAVES, LOADS]), (2, 2, 1, {}, [SAVES])],
    "parameters are shared": [
        (4, 1, 2, {"sharded_data_parallel_degree": 2}, [STEPS, NORMS, SAVES]), (1, 1, 1, {}, [SAVES]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "layouts",
    [some_of(3, CASES["partitions"])[0], *(pytest.param(layouts, marks=long) for layouts in CASES.values())],
    ids=["some", *CASES],
)
@pytest.mark.timeout(900)
def test_steps(layouts: Layouts, tmp_path: Path) -> None:
    for ranks, partitions, parts, settings, checks in layouts:
        pass_checks(
            "experts.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env={"WEFT_SET": json.dumps({"tensor_parallel_degree": parts, **settings})},
        )  # fmt: skip
