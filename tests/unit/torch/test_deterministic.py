"""Two runs give the same bits, however long everything takes in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in
from weft.config import Settings
from weft.errors import ConfigError

SCRIPT = """\
import hashlib, json, os, random, sys, time
import torch
import weft.torch as weft

weft.init({"partitions": 2, "microbatches": 4, "deterministic": True})
slow, clock = int(sys.argv[1]), random.Random()


class Block(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.inner = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))

    def forward(self, x):
        time.sleep(0.03 * (self.number == slow) + 0.002 * clock.random())
        return x + self.inner(x)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.blocks = torch.nn.ModuleList(map(Block, range(5)))
        self.head = torch.nn.Linear(32, 64, bias=False)
        if "tied" in sys.argv:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(1)
model = weft.DistributedModel(Net())
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@weft.step
def step(model, x):
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    model.backward(loss)
    return loss


data = torch.Generator().manual_seed(weft.dp_rank())
for _ in range(6):
    optimizer.zero_grad()
    step(model, torch.randint(64, (16, 20), generator=data))
    optimizer.step()
state = model.state_dict()
if weft.rank() == 0:
    places = [unit["partition"] for unit in weft.partition_report().to_dict()["models"][0]["units"]]
    print("RESULT", places, hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest())
"""


@pytest.mark.parametrize("ranks, words", one_in(3, [(2, ("tied",)), (2, ()), (6, ())]))
def test_runs_with_other_times_give_the_same_bits(ranks, words, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    found = set()
    for slow in ("0", "4"):  # by its time this block would lie on a partition of its own
        done = run_ranks(ranks, script, [slow, *words], warm=True).check()
        found |= {line for line in done.stdout.splitlines() if line.startswith("RESULT")}
    assert len(found) == 1


@pytest.mark.parametrize("pipeline", ["auto", "list"])
def test_schedules_that_follow_measured_times_are_refused(pipeline):
    with pytest.raises(
        ConfigError, match=f'pipeline is "{pipeline}", which follows measured times, but determ'
    ):
        Settings(deterministic=True, pipeline=pipeline)
