"""A model twice as big as fits into a process's limit trains when it is split; see `limited.py`.

A layer has 4 MiB, and AdamW four times that: parameters, gradients and two moments.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launching import Completed, run_ranks
from tests.long import long

from .jobs import ROOT

JOB = Path(__file__).parent / "limited.py"
ALLOWANCE_MIB = 400
FITS, TOO_LARGE = 21, 26

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's limits and /proc")


def trained(layers: int, partitions: int) -> Completed:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    arguments = ["--partitions", partitions, "--layers", layers, "--allowance", ALLOWANCE_MIB]
    return run_ranks(partitions, JOB, [*map(str, arguments)], env={"PYTHONPATH": path}, timeout=400)


def test_what_fits_trains_alone():
    assert f"trained {4 * FITS} MiB" in trained(FITS, 1).check().stdout


def test_what_does_not_fit_fails_alone():
    done = trained(TOO_LARGE, 1)
    assert done.returncode != 0 and "allocate memory" in done.stderr, done.stderr


@long
def test_twice_what_does_not_fit_trains_split_in_four():
    done = trained(2 * TOO_LARGE, 4).check()
    assert done.stdout.count(f"trained {8 * TOO_LARGE} MiB") == 4


OVERSIZED = """
import contextlib, copy, sys, torch
from torch import nn
import weft.torch as weft
from weft.torch.verify import lender

torch.manual_seed(0)

class Doubled(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        return 2 * found if found.sum().item() > 0 else found  # cannot be traced without values

last = [Doubled(256, 256)] if sys.argv[1] == "reads" else []
net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)], nn.BatchNorm1d(256), *last)
net[7].weight = net[0].weight  # tied
plain = copy.deepcopy(net)

class count:  # parameters of other ranks that are on the first one at once
    now = most = 0

real = lender.filled

@contextlib.contextmanager
def filled(tensor, values):
    count.now += 1
    count.most = max(count.most, count.now)
    with real(tensor, values):
        yield
    count.now -= 1

lender.filled = filled
weft.init(partitions=2, microbatches=2, memory_limit=0.003)  # 2 MiB of weights, as many of gradients: no rank has both
model = weft.DistributedModel(net)
optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2))
other = torch.optim.AdamW(plain.parameters(), 1e-2)

@weft.step
def step(model, x):
    loss = model(x).pow(2).mean()
    model.backward(loss)
    return loss

for number in range(3):
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = step(model, x).reduce_mean()
    optimizer.step()
    other.zero_grad()
    beside = sum(plain(part).pow(2).mean() / 2 for part in x.chunk(2))
    beside.backward()
    other.step()
    torch.testing.assert_close(loss, beside.detach())
assert model.oversized
mine = {name: value for name, value in model.local_named_parameters()}
assert mine and len(mine) < 19
for name, value in plain.named_parameters():
    if name in mine:
        torch.testing.assert_close(mine[name], value)
assert count.most == (2 if weft.rank() == 0 else 0), "of each unit its weight and bias"
print("equal")
"""


@pytest.mark.parametrize("code", ["plain", "reads"])
def test_a_model_larger_than_a_rank_is_traced_without_its_values(tmp_path: Path, code: str):
    script = tmp_path / "train.py"
    script.write_text(OVERSIZED)
    done = run_ranks(2, script, [code], timeout=100).check()
    assert done.stdout.count("equal") == 2
    assert ("traced with its values" in done.stderr + done.stdout) == (code == "reads")


CHANGED = """
import sys, torch
from torch import nn
import weft.torch as weft

weft.init(partitions=2, microbatches=2)
large, small = torch.randn(300, 300), torch.randn(100, 100)
before = small.clone()
with weft.delay_param_initialization(), torch.no_grad():
    net = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    net[0].weight.copy_(large)
    net[1].weight[:100, :100].copy_(small)
small.zero_()
if sys.argv[1] == "large":
    large.zero_()
model = weft.DistributedModel(net)

@weft.step
def step(model, x):
    return model(x).mean()

step(model, torch.ones(4, 300))
mine = dict(model.local_named_parameters())
if "module.0.weight" in mine:
    assert torch.equal(mine["module.0.weight"], large)
else:
    assert torch.equal(mine["module.1.weight"][:100, :100], before)
print("as they were")
"""


@pytest.mark.parametrize("changed", ["small", "large"])
def test_delayed_values_are_those_that_were_given(tmp_path: Path, changed: str):
    script = tmp_path / "train.py"
    script.write_text(CHANGED)
    done = run_ranks(2, script, [changed], timeout=100)
    if changed == "small":
        assert done.check().stdout.count("as they were") == 2
    else:
        assert done.returncode and "was written to afterwards" in done.stderr
