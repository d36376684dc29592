"""Replicas of a pipeline share parameters, which are gathered for each microbatch; see `gathered.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in, some_of

from .gathered import CHECKS
from .jobs import FOLDER, PATHS, Layout, pass_layouts

ENDS = {
    "a_weight_that_is_given_back_is_read": "reads a weight of shape [12] that belongs to it, and has values",
    "replicas_run_other_layers": "ranks that hold parts of the same weights run different programs",
}
"""These end a job, and what it says then."""
ALL = [name for name in CHECKS if name not in ENDS]
STEPS = "steps_give_the_weights_and_states_of_one_process"
SAVES = "saves_go_to_other_layouts"
GATHERED = {"sharded_parameters_gathered": "microbatch"}
TWO = {**GATHERED, "sharded_data_parallel_degree": 2}
LAYOUTS: list[Layout] = [
    (4, 2, TWO, ALL),
    (1, 1, GATHERED, [SAVES]),
    (4, 1, {**TWO, "tensor_parallel_degree": 2}, [STEPS, SAVES, "checkpointed_layers_are_gathered_again"]),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(6, LAYOUTS), ids=["some", "all"])
def test_parameters_are_gathered_for_each_microbatch(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("gathered.py", layouts, tmp_path, timeout=800)


@pytest.mark.parametrize("check", one_in(2, ENDS))
def test_what_would_differ_ends_the_job(check: str) -> None:
    env = {**PATHS, "WEFT_SET": json.dumps(TWO)}
    done = run_ranks(4, FOLDER / "gathered.py", ["--partitions", "2", check], env=env, warm=True)
    assert done.returncode != 0 and ENDS[check] in done.stdout + done.stderr, done.stdout + done.stderr
