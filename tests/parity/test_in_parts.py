"""Steps with weights that are cut over ranks, with partitions and replicas; see `in_parts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_ranks
from tests.long import one_day_in, one_in, some_of

from .in_parts import CHECKS
from .jobs import FOLDER, PATHS, pass_checks

ENDS = [
    "other_batches_are_an_error",
    "a_cut_module_that_a_step_calls_by_itself_is_refused",
    "weights_that_a_step_reads_itself_must_be_whole",
    "weights_that_another_module_reads_must_be_whole",
    "unknown_words_are_an_error",
]
"""After these a job cannot go on."""
FAILS = "what_cannot_be_cut_as_the_script_says_is_an_error"
ALL = [name for name in CHECKS if name not in (*ENDS, FAILS)]
SAVES = ["saves_go_to_other_layouts", "vocabularies_go_to_other_layouts"]
SOME = [
    "steps_give_the_weights_and_states_of_one_process",
    "norms_are_those_of_the_whole_model",
    "vocabularies_are_cut",
]
LAYOUTS = [  # ranks, partitions, ranks that split tensors
    (2, 1, 2, ALL),
    (4, 2, 2, ALL),
    (4, 1, 2, [*SOME, *SAVES]),
    (3, 1, 3, SOME),
    (2, 2, 1, SAVES),
    (1, 1, 1, SAVES),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(4, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[tuple[int, int, int, list[str]]], tmp_path: Path) -> None:
    for ranks, partitions, parts, checks in layouts:
        settings = json.dumps({"tensor_parallel_degree": parts})
        pass_checks(
            "in_parts.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env={"WEFT_SET": settings},
        )  # fmt: skip


@pytest.mark.parametrize("check", one_in(3, ENDS))
def test_what_would_differ_between_ranks_is_refused(check: str) -> None:
    settings = json.dumps({"tensor_parallel_degree": 2})
    pass_checks("in_parts.py", [check], 2, env={"WEFT_SET": settings})


def test_what_cannot_be_cut_as_the_script_says_ends_the_job() -> None:
    settings = {"WEFT_SET": json.dumps({"tensor_parallel_degree": 2})}
    done = run_ranks(2, FOLDER / "in_parts.py", [FAILS], env={**PATHS, **settings}, warm=True)
    assert (
        done.returncode and '0 is set to "column", and its 25 results cannot be divided by 2' in done.stderr
    )


LOADS = "a_whole_state_is_loaded_into_parts"


@one_day_in(2)
@pytest.mark.parametrize(
    "layouts",
    one_in(
        3,
        [
            [
                (4, {"tensor_parallel_degree": 2, "shard_optimizer_state": True}, [*SOME, *SAVES, LOADS]),
                (2, {"tensor_parallel_degree": 2}, SAVES),
                (1, {}, SAVES),
            ],
            [
                (
                    4,
                    {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2},
                    [*SOME[:2], *SAVES, LOADS],
                ),
                (1, {}, SAVES),
            ],
            [
                (1, {}, SAVES),
                (4, {"tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2}, SAVES),
            ],
        ],
    ),
    ids=["states", "parameters", "parameters, later"],
)
def test_replicas_share_parts(layouts: list[tuple[int, dict[str, Any], list[str]]], tmp_path: Path) -> None:
    for ranks, settings, checks in layouts:
        pass_checks(
            "in_parts.py", checks, ranks, "--folder", str(tmp_path), env={"WEFT_SET": json.dumps(settings)}
        )
