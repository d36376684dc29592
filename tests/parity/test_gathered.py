"""Replicas of a pipeline share parameters, which are gathered for each microbatch; see `gathered.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in, some_of

from .gathered import CHECKS
from .jobs import FOLDER, ROOT, pass_checks

ENDS = {
    "a_weight_that_is_given_back_is_read": "reads a weight of shape [12] that belongs to it, which replicas",
    "replicas_run_other_layers": "ranks that hold parts of the same weights run different programs",
}
"""These end a job, and what it says then."""
ALL = [name for name in CHECKS if name not in ENDS]
STEPS = "steps_give_the_weights_and_states_of_one_process"
SAVES = "saves_go_to_other_layouts"
LAYOUTS = [  # ranks, partitions, ranks that split tensors, checks
    (4, 2, 1, ALL),
    (1, 1, 1, [SAVES]),
    (4, 1, 2, [STEPS, SAVES, "checkpointed_layers_are_gathered_again"]),
]


def settings(tensor: int = 1, sharers: int = 2) -> dict[str, str]:
    given = {"sharded_data_parallel_degree": sharers, "tensor_parallel_degree": tensor}
    return {"WEFT_SET": json.dumps({**given, "sharded_parameters_gathered": "microbatch"})}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(6, LAYOUTS), ids=["some", "all"])
def test_parameters_are_gathered_for_each_microbatch(
    layouts: list[tuple[int, int, int, list[str]]], tmp_path: Path
) -> None:
    for ranks, partitions, tensor, checks in layouts:
        pass_checks(
            "gathered.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env=settings(tensor, 2 if ranks > 1 else 1), timeout=800,
        )  # fmt: skip


@pytest.mark.parametrize("check", one_in(2, ENDS))
def test_what_would_differ_ends_the_job(check: str) -> None:
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = run_ranks(
        4, FOLDER / "gathered.py", ["--partitions", "2", check], env={**path, **settings()}, warm=True
    )
    assert done.returncode != 0 and ENDS[check] in done.stdout + done.stderr, done.stdout + done.stderr
