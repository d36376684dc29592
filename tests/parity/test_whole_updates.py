"""Optimizers that look at whole weights, with weights in parts; see `whole_updates.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long import one_day_in, some_of

from .jobs import pass_checks
from .whole_updates import CHECKS

COPIES = "copies_of_16_bit_weights_are_updated_whole"
"""Sets its layouts itself."""
ALL = [name for name in CHECKS if name != COPIES]
STEPS = [name for name in CHECKS if name.startswith("steps_are")]
SAVES = [name for name in CHECKS if name.startswith("saves_go")]
TENSORS, SHARES = {"tensor_parallel_degree": 2}, {"sharded_data_parallel_degree": 2}
LAYOUTS: list[tuple[int, int, dict[str, Any], list[str]]] = [  # ranks, partitions, settings
    (2, 1, TENSORS, ALL),
    (4, 2, SHARES, ALL),
    (1, 1, {}, SAVES),
    (4, 2, TENSORS, [*STEPS, *SAVES]),
    (3, 1, {"tensor_parallel_degree": 3}, [*STEPS, *SAVES]),
    (4, 2, {**SHARES, "sharded_parameters_gathered": "microbatch"}, STEPS),
    (4, 1, {**TENSORS, **SHARES}, ALL),
    (4, 1, {**TENSORS, "shard_optimizer_state": True}, [*STEPS, *SAVES]),
    (4, 1, {**TENSORS, "offload_optimizer": True}, [*STEPS, *SAVES]),
    (4, 1, {**TENSORS, "context_parallel_degree": 2}, [name for name in STEPS if "words" in name]),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layouts", some_of(10, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[tuple[int, int, dict[str, Any], list[str]]], tmp_path: Path) -> None:
    for ranks, partitions, settings, checks in layouts:
        pass_checks(
            "whole_updates.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env={"WEFT_SET": json.dumps(settings)}, timeout=900,
        )  # fmt: skip


@one_day_in(3)
def test_copies(tmp_path: Path) -> None:
    pass_checks("whole_updates.py", [COPIES], 4, "--folder", str(tmp_path))
