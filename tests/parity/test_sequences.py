"""Steps with sequences that are cut over ranks, with partitions and copies of the model; see `sequences.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .jobs import pass_checks
from .sequences import CHECKS

END = "models_without_sequences_are_refused"
"""After this a job cannot go on."""
ALL = [name for name in CHECKS if name != END]
SAVES = ["saves_go_to_other_layouts"]
SOME = ["steps_give_the_weights_and_states_of_one_process", "norms_are_those_of_the_whole_model"]
LAYOUTS = [  # ranks, partitions, settings, checks
    (2, 1, {"context_parallel_degree": 2}, [*ALL, END]),
    (4, 2, {"context_parallel_degree": 2}, [*SOME, *SAVES, "outside_of_steps_a_rank_computes_by_itself"]),
    (4, 1, {"context_parallel_degree": 2, "shard_optimizer_state": True}, [*SOME, *SAVES]),
    (2, 2, {}, SAVES),
]


@pytest.mark.timeout(1200)
def test_steps(tmp_path: Path) -> None:
    for ranks, partitions, settings, checks in LAYOUTS:
        pass_checks(
            "sequences.py", checks, ranks, "--folder", str(tmp_path), "--partitions", str(partitions),
            env={"WEFT_SET": json.dumps(settings)},
        )  # fmt: skip
