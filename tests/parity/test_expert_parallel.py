"""Mixtures whose experts replicas share, with partitions, tensor parallelism and sharded parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long import long

from .expert_parallel import CHECKS
from .jobs import pass_checks

MODELS = [name for name in CHECKS if name.startswith("models_of_transformers")]
ALL = [name for name in CHECKS if name not in MODELS]
STEPS = "steps_give_the_weights_and_states_of_one_process"
NORMS = "norms_of_all_kinds_are_those_of_the_whole"
LOADS = "a_whole_state_is_loaded_into_parts"
SAVES = "saves_go_to_other_layouts"
RANDOM = "random_mixtures"

Layouts = list[tuple[int, int, int, dict[str, Any], list[str]]]
"""Ranks, partitions, replicas that share experts, more settings, checks."""
BY_MICROBATCH = {"sharded_data_parallel_degree": 2, "sharded_parameters_gathered": "microbatch"}
CASES: dict[str, Layouts] = {
    "one partition": [(2, 1, 2, {}, ALL), (1, 1, 1, {}, [SAVES])],
    "two partitions": [
        (4, 2, 2, {}, ALL), (2, 2, 1, {}, [SAVES]), (2, 1, 1, {"tensor_parallel_degree": 2}, [SAVES]),
    ],
    "several groups": [(4, 1, 2, {}, [STEPS, NORMS, SAVES, RANDOM]), (2, 1, 2, {}, [SAVES]), (2, 1, 1, {}, [SAVES])],
    "tensor parallel": [(4, 1, 2, {"tensor_parallel_degree": 2}, [STEPS, NORMS, SAVES, LOADS])],
    "states are sharded": [
        (4, 2, 2, {"shard_optimizer_state": True}, [STEPS, NORMS, SAVES, LOADS]), (4, 1, 2, {}, [SAVES]),
    ],
    "sharded": [
        (4, 2, 2, {"sharded_data_parallel_degree": 2}, [STEPS, NORMS, SAVES]), (4, 2, 2, BY_MICROBATCH, [STEPS, SAVES]),
        (4, 1, 2, {**BY_MICROBATCH, "sharded_data_parallel_degree": 4}, [STEPS, NORMS]),
    ],
    "transformers": [(2, 1, 2, {}, MODELS), (4, 2, 2, {}, MODELS)],
}  # fmt: skip
FEW = [
    (2, 1, 2, {}, [each for each in ALL if each not in (SAVES, LOADS, RANDOM)]),
    (4, 2, 2, {}, [STEPS, NORMS]),
]


@pytest.mark.parametrize(
    "layouts", [FEW, *(pytest.param(layouts, marks=long) for layouts in CASES.values())], ids=["few", *CASES]
)
@pytest.mark.timeout(900)
def test_steps(layouts: Layouts, tmp_path: Path) -> None:
    for ranks, partitions, replicas, settings, checks in layouts:
        pass_checks(
            "expert_parallel.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env={"WEFT_SET": json.dumps({"expert_parallel_degree": replicas, **settings})},
        )  # fmt: skip
