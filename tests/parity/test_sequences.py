"""Steps with sequences that are cut over ranks, with partitions and replicas; see `sequences.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import FOLDER, PATHS, Layout, pass_layouts
from .sequences import CHECKS

END = "models_without_sequences_are_refused"
WRITES = {
    "writes_of_some_positions_are_refused[items]": "setitem writes into a tensor that is split over axis tp",
    "writes_of_some_positions_are_refused[view]": "getitem has taken a piece of a tensor that ranks share",
}
"""After these a job cannot go on."""
ALL = [name for name in CHECKS if name not in (END, *WRITES)]
SAVES = ["saves_go_to_other_layouts"]
SOME = ["steps_give_the_weights_and_states_of_one_process", "norms_are_those_of_the_whole_model"]
LATE = ["parameters_may_be_made_late", "code_between_layers_may_use_weights"]
ATTENTION = "attention_takes_own_heads_or_own_positions"
BOTH = ["layers_may_be_checkpointed", "chance_is_the_same_where_tensors_are_whole"]
BESIDE = "whole_tensors_beside_parts_cost_nothing"
WRITTEN = "what_linears_share_may_be_written_in_between"
WITH_HEADS = ["layers_may_be_checkpointed", "samples_and_heads_may_be_one_dimension", BESIDE, WRITTEN]
PRECISE = ["norms_have_one_precision_on_all_ranks"]
MODELS = [name for name in CHECKS if name.startswith("a_model_trains")]
MORE = ["outside_of_steps_a_rank_computes_by_itself", *MODELS]
BY_LAYER = {"sharded_data_parallel_degree": 2, "sharded_parameters_gathered": "microbatch"}
LAYOUTS: list[Layout] = [
    (2, 1, {"context_parallel_degree": 2}, ALL),
    (2, 1, {"tensor_parallel_degree": 2}, [BESIDE]),
    (4, 2, {"context_parallel_degree": 2}, [*SOME, *SAVES, *LATE, *MORE, *PRECISE]),
    (4, 1, {"context_parallel_degree": 4}, [ATTENTION]),
    (4, 1, {"context_parallel_degree": 2, "shard_optimizer_state": True}, [*SOME, *SAVES, *MODELS]),
    (4, 1, {"context_parallel_degree": 2, "sharded_data_parallel_degree": 2}, [*SOME, *SAVES, *LATE]),
    (
        4,
        1,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
        [*SOME, *SAVES, *WITH_HEADS, ATTENTION],
    ),
    (
        4,
        1,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "sequence_parallel": True},
        [*SOME, *SAVES, "layers_may_be_checkpointed", *MODELS],
    ),
    (4, 1, {"context_parallel_degree": 2, **BY_LAYER}, [SOME[0], *SAVES, "gradients_may_be_scaled", *MODELS]),
    (
        8,
        1,
        {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2},
        [*SOME, *SAVES],
    ),
    (8, 1, {"context_parallel_degree": 2, "tensor_parallel_degree": 2, **BY_LAYER}, [SOME[0]]),
    (2, 2, {}, SAVES),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layouts", some_of(4, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("sequences.py", layouts, tmp_path)


def test_a_model_without_sequences_is_refused() -> None:
    env = {"WEFT_SET": '{"context_parallel_degree": 2}', **PATHS}
    done = run_ranks(2, FOLDER / "sequences.py", [END], env=env, warm=True)
    told = done.stdout + done.stderr
    assert done.returncode and "no module of the model can compute on parts of sequences" in told
    assert (
        '"context_parallel_degree": 1' in told
        and "it gets no tensor of samples, positions and features" in told
    )


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("check", WRITES)
def test_writes_that_pytorch_would_lose_are_refused(check: str, tensor: int) -> None:
    settings = {"context_parallel_degree": 2, "tensor_parallel_degree": tensor}
    env = {"WEFT_SET": json.dumps(settings), **PATHS}
    done = run_ranks(2 * tensor, FOLDER / "sequences.py", [check], env=env, warm=True)
    assert done.returncode and WRITES[check] in done.stdout + done.stderr
