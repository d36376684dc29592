"""Steps whose tensors stay in parts between cut modules, with partitions; see `spread.py`."""

from __future__ import annotations

import json

import pytest

from .jobs import pass_checks
from .spread import CHECKS

ALL = [*CHECKS]
SOME = [
    "losses_in_steps_are_on_the_parts", "tokens_of_own_models_are_in_parts",
    "functions_give_what_they_give_for_the_whole",
]  # fmt: skip
WITHOUT_A_MODEL = [
    "functions_give_what_they_give_for_the_whole", "losses_take_few_bytes_and_16_bits",
    "what_parts_cannot_do_is_an_error", "tokens_in_parts_take_less_memory",
]  # fmt: skip
"""They are the same whatever the partitions; or there is one partition in them."""
LAYOUTS = [(2, 1, 2, ALL), (4, 2, 2, [each for each in ALL if each not in WITHOUT_A_MODEL]), (3, 1, 3, SOME)]
"""Ranks, partitions, ranks that split tensors."""


@pytest.mark.timeout(900)
def test_steps() -> None:
    for ranks, partitions, parts, checks in LAYOUTS:
        settings = json.dumps({"tensor_parallel_degree": parts})
        pass_checks("spread.py", checks, ranks, "--partitions", str(partitions), env={"WEFT_SET": settings})
