"""Whole weights for an inference engine, in each layout; see `streamed.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import FOLDER, PATHS, Layout, pass_checks, pass_layouts
from .streamed import CHECKS

LAST = ["other_arguments_are_told", "a_rank_that_stops_early_is_named"]
"""After each of these a job cannot go on."""
ABSENT = "a_rank_that_does_not_come_is_named"
PEFT = importlib.util.find_spec("peft") is not None
ALL = [name for name in CHECKS if name not in (*LAST, ABSENT) and (PEFT or not name.startswith("adapters"))]
WEIGHTS = [name for name in ALL if name.startswith("weights_are")]
SOME = [
    *WEIGHTS,
    "engines_compute_what_the_model_does",
    *(["adapters_are_merged_as_peft_does"] if PEFT else []),
    "ranks_that_stop_together_go_on",
]
LATE = "parameters_that_are_made_late_come_whole"
LAYOUTS: list[Layout] = [
    (2, 2, {}, ALL),
    (1, 1, {}, [name for name in ALL if name != LATE]),
    (2, 1, {"tensor_parallel_degree": 2}, [*SOME, LATE]),
    (2, 1, {"sharded_data_parallel_degree": 2}, SOME),
    (2, 1, {}, SOME),
    (4, 2, {"tensor_parallel_degree": 2}, [*SOME, LATE]),
    (4, 2, {"sharded_data_parallel_degree": 2}, [*SOME, LATE]),
    (4, 2, {"sharded_data_parallel_degree": 2, "sharded_parameters_gathered": "microbatch"}, SOME),
    (2, 1, {"expert_parallel_degree": 2}, ["weights_are_those_of_one_process[MixtralForCausalLM]"]),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_weights_are_streamed(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("streamed.py", layouts, tmp_path)


@pytest.mark.parametrize("name", LAST)
def test_ranks_that_differ(name: str) -> None:
    pass_checks("streamed.py", [name], 2, "--partitions", "2")


def test_a_rank_that_does_not_come() -> None:
    done = run_ranks(2, FOLDER / "streamed.py", ["--partitions", "2", ABSENT], env=PATHS, warm=True)
    output = done.stdout + done.stderr
    assert done.returncode and "stream_weights() was called by rank 0 only: rank 1 " in output, output
