"""What a script reads between resuming and the first step, which splits the model: what was saved, or an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import run_ranks

BEGIN = """
import copy, sys, warnings
import pytest, torch
from torch import nn
import weft.torch as weft
from weft.errors import UsageError

warnings.simplefilter("ignore")
root, width = sys.argv[1], int(sys.argv[2])
weft.init({"partitions": 2, "microbatches": 2})

@weft.step
def train_step(model, x):
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss

class Job:
    def __init__(self, seed, wrapped=True):
        torch.manual_seed(seed)
        self.model = weft.DistributedModel(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        if wrapped:
            self.optimizer = weft.DistributedOptimizer(self.optimizer)

    def train(self, steps=1):
        for number in range(steps):
            self.optimizer.zero_grad()
            train_step(self.model, torch.arange(16.0).reshape(4, 4) / 10 + number)
            self.optimizer.step()

    def resume(self, **more):
        weft.resume_from_checkpoint(root, model=self.model, optimizer=self.optimizer, **more)

def copied(state):
    return {name: value.clone() for name, value in state.items()}

def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            same(value, b[name])
        else:
            assert torch.equal(value, b[name]), name

old = Job(0)
old.train(2)
weft.save_checkpoint(root, "a", model=old.model, optimizer=old.optimizer)
weft.save_checkpoint(root, "whole", partial=False, model=old.model)
weights, states = copied(old.model.state_dict()), copy.deepcopy(old.optimizer.state_dict()["state"])
part = old.model.local_state_dict()
"""

MODELS = """
for given in ({"tag": "a"}, {"tag": "whole", "partial": False}):
    job = Job(1)
    job.resume(**given)
    same(job.model.state_dict(), weights)
    same(dict(job.model.module.named_parameters()), weights)
    average = copy.deepcopy(job.model)
    job.train()
    same(average.state_dict(), weights)
    assert not torch.equal(job.model.state_dict()["2.bias"], weights["2.bias"])
    del job, average

job = Job(1)
job.model.load_state_dict(part)
for read in (job.model.state_dict, lambda: copy.deepcopy(job.model)):
    with pytest.raises(UsageError, match="before the first step would have the weights from before load_state_dict"):
        read()
job.model.load_state_dict(weights)
same(job.model.state_dict(), weights)
del job

job = Job(1)
job.resume(tag="a")
other = {name: value + 1 for name, value in weights.items()}
job.model.load_state_dict(other)
average = copy.deepcopy(job.model)
job.train()
same(average.state_dict(), other)
"""

OPTIMIZERS = """
old.train(2)
expected = copied(old.model.state_dict())
for wrapped in (True, False):
    job = Job(1, wrapped)
    job.resume(tag="a")
    same(job.optimizer.state_dict()["state"], states)
    job.train(2)
    same(job.model.state_dict(), expected)
    del job

job = Job(1)
job.resume(tag="a")
doubled = job.optimizer.state_dict()
for entry in doubled["state"].values():
    entry["step"] = entry["step"] + 7
job = Job(1)
job.resume(tag="a")
job.optimizer.load_state_dict(doubled)  # newer than the checkpoint's
job.train()
assert {int(entry["step"]) for entry in job.optimizer.state_dict()["state"].values()} == {10}
"""

DELAYED = """
with weft.delay_param_initialization():
    job = Job(1)
job.resume(tag="a")
for read in (job.model.state_dict, lambda: copy.deepcopy(job.model), job.optimizer.state_dict):
    with pytest.raises(UsageError, match="before the first step|not made yet"):
        read()
old.train(1)
job.train(1)
same(job.model.state_dict(), old.model.state_dict())
"""


@pytest.mark.parametrize(("script", "width"), [(MODELS, 8), (OPTIMIZERS, 8), (DELAYED, 5000)])
def test_what_was_saved_is_there_before_the_first_step(tmp_path: Path, script: str, width: int):
    run_ranks(2, BEGIN + script, [str(tmp_path), str(width)], timeout=120, warm=True).check()
