"""Steps whose tensors stay sharded between cut modules, with partitions; see `sharded_activations.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import some_of

from .jobs import Layout, pass_layouts
from .sharded_activations import CHECKS

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
TWO = {"tensor_parallel_degree": 2}
LAYOUTS: list[Layout] = [
    (2, 1, TWO, ALL),
    (4, 2, TWO, [each for each in ALL if each not in WITHOUT_A_MODEL]),
    (3, 1, {"tensor_parallel_degree": 3}, SOME),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layouts", some_of(3, LAYOUTS), ids=["some", "all"])
def test_steps(layouts: list[Layout], tmp_path: Path) -> None:
    pass_layouts("sharded_activations.py", layouts, tmp_path)


LOOKS = """
import sys
import torch
from torch import nn
import weft.torch as weft

weft.init({"tensor_parallel_degree": 2, "microbatches": 2})
torch.manual_seed(0)
model = weft.DistributedModel(nn.Sequential(nn.Embedding(211, 16), nn.Linear(16, 211)))

@weft.step
def train_step(model, ids):
    scores = model(ids)[:, :-1]
    if weft.rank() == int(sys.argv[1]) and not weft.is_tracing():
        scores.argmax(-1)
    loss = nn.functional.cross_entropy(scores.reshape(-1, 211), ids[:, 1:].reshape(-1))
    model.backward(loss)
    return loss

for _ in range(3):
    train_step(model, torch.arange(36).reshape(4, 9))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_looks_alone_ends_the_job(rank: int) -> None:
    done = run_ranks(2, LOOKS, [str(rank)], timeout=60, warm=True)
    assert done.returncode
    assert (
        "ranks that hold parts of the same weights run different programs: in the same place" in done.stderr
    )
    assert "all-gathers a sharded tensor" in done.stderr


FAILS = """
import os
import sys
import torch
from torch import nn
import weft.torch as weft

weft.init({"tensor_parallel_degree": 2, "sequence_parallel": True, "microbatches": 2})
torch.manual_seed(0)


class Fails(nn.Module):
    count = 0

    def forward(self, x):
        Fails.count += not weft.is_tracing()
        if weft.rank() == 1 and Fails.count > 12:
            if sys.argv[1] == "ends":
                os._exit(7)
            raise ValueError("a block of this rank fails")
        return torch.relu(x)


model = weft.DistributedModel(
    nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), Fails(), nn.Linear(64, 16)) for _ in range(3)))
)

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

for _ in range(100):
    train_step(model, torch.ones(4, 6, 16))
"""


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_a_rank_that_fails_between_sums_ends_the_job(how: str) -> None:
    """The other one waits for it in memory that they share."""
    done = run_ranks(2, FAILS, [how], timeout=60, warm=True)
    assert done.returncode
    assert ("ended" if how == "ends" else "a block of this rank fails") in done.stderr
