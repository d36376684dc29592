"""Weights wait in host memory; see `offloaded.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import FOLDER, PATHS, Layout, pass_layouts
from .offloaded import CHECKS

READ = "a_weight_that_is_given_back_is_read"
"""This ends a job."""
MEMORY = "few_layers_are_resident"
ALL = [name for name in CHECKS if name not in (READ, MEMORY)]
STEPS = "steps_give_the_weights_and_states_of_one_process"
SAVES = "saves_go_to_other_layouts"
WEIGHTS = {"offload_weights": True}
ALSO = {"offload_weights": True, "offload_activations": True, "offload_optimizer": True}
LAYOUTS: list[Layout] = [
    (2, 2, WEIGHTS, ALL),
    (1, 1, {}, [SAVES]),
    (1, 1, ALSO, [STEPS, SAVES, "adapters_over_a_frozen_base", "checkpointed_layers_are_gathered_again"]),
    (4, 2, ALSO, [STEPS, SAVES, "adapters_over_a_frozen_base"]),
    (4, 2, {**WEIGHTS, "shard_optimizer_state": True}, [STEPS, SAVES]),
    (2, 1, {**WEIGHTS, "tensor_parallel_degree": 2}, [STEPS, SAVES]),
    (2, 1, {**WEIGHTS, "context_parallel_degree": 2}, [SAVES]),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(7, LAYOUTS), ids=["some", "all"])
def test_weights_wait_in_host_memory(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("offloaded.py", layouts, tmp_path, timeout=800)


@pytest.mark.parametrize("partitions", [1, 2])
def test_memory_of_the_device_is_free(partitions: int, tmp_path: Path) -> None:
    pass_layouts("offloaded.py", [(partitions, partitions, {}, [MEMORY])], tmp_path)


def test_a_weight_that_is_not_there_is_refused() -> None:
    env = {**PATHS, "WEFT_SET": json.dumps(WEIGHTS)}
    done = run_ranks(2, FOLDER / "offloaded.py", ["--partitions", "2", READ], env=env, warm=True)
    text = "reads a weight of shape [12] that belongs to it, and has values only while that module runs"
    assert done.returncode != 0 and text in done.stdout + done.stderr, done.stdout + done.stderr
