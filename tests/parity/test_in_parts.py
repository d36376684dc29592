"""Steps with weights that are cut over ranks, with partitions and replicas; see `in_parts.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_day_in, one_in, some_of

from .in_parts import CHECKS
from .jobs import FOLDER, PATHS, Layout, pass_checks, pass_layouts

ENDS = [
    "other_batches_are_an_error",
    "a_cut_module_that_a_step_calls_by_itself_is_refused",
    "weights_that_a_step_reads_itself_must_be_whole",
    "weights_that_another_module_reads_must_be_whole",
    "unknown_words_are_an_error",
    "a_write_into_a_piece_that_only_a_later_one_takes_is_an_error[step]",
    "a_write_into_a_piece_that_only_a_later_one_takes_is_an_error[evaluation]",
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
TWO = {"tensor_parallel_degree": 2}
LAYOUTS: list[Layout] = [
    (2, 1, TWO, ALL),
    (4, 2, TWO, ALL),
    (4, 1, TWO, [*SOME, *SAVES]),
    (3, 1, {"tensor_parallel_degree": 3}, SOME),
    (2, 2, {}, SAVES),
    (1, 1, {}, SAVES),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(4, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("in_parts.py", layouts, tmp_path)


@pytest.mark.parametrize("check", one_in(3, ENDS))
def test_what_would_differ_between_ranks_is_refused(check: str) -> None:
    pass_checks("in_parts.py", [check], 2, env={"WEFT_SET": json.dumps(TWO)})


def test_what_cannot_be_cut_as_the_script_says_ends_the_job() -> None:
    env = {**PATHS, "WEFT_SET": json.dumps(TWO)}
    done = run_ranks(2, FOLDER / "in_parts.py", [FAILS], env=env, warm=True)
    assert (
        done.returncode and '0 is set to "column", and its 25 results cannot be divided by 2' in done.stderr
    )


SHARED = {**TWO, "sharded_data_parallel_degree": 2}
LOADS = "a_whole_state_is_loaded_into_parts"


@one_day_in(2)
@pytest.mark.parametrize(
    "layouts",
    one_in(
        3,
        [
            [
                (4, 1, {**TWO, "shard_optimizer_state": True}, [*SOME, *SAVES, LOADS]),
                (2, 1, TWO, SAVES),
                (1, 1, {}, SAVES),
            ],
            [(4, 1, SHARED, [*SOME[:2], *SAVES, LOADS]), (1, 1, {}, SAVES)],
            [(1, 1, {}, SAVES), (4, 1, SHARED, SAVES)],
        ],
    ),
    ids=["states", "parameters", "parameters, later"],
)
def test_replicas_share_parts(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("in_parts.py", layouts, tmp_path)
