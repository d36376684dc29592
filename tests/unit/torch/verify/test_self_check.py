"""A PyTorch that nobody has tested is tried before the job begins, and only what fails is refused."""

from __future__ import annotations

import pytest
import torch

from tests.launching import run_ranks
from tests.long import one_day_in
from weft.torch.verify import self_check

UNTESTED = """
import torch, torch.utils.checkpoint as checkpoints
torch.__version__ = "2.99.0"
import weft.torch as weft
from weft.errors import UsageError
from weft.torch.execution import entry_points
from weft.torch.execution.glue import Glue
from torch import nn

def broken(glue, function, args, kwargs, call=Glue.call):
    return call(glue, function, args, kwargs) * 2

Glue.call = broken
checkpoints._renamed = None
entry_points.CHECKPOINT_GENERATOR = "torch.utils.checkpoint._renamed"

# What a user's script looks like.
weft.init({"partitions": 2, "microbatches": 2, "auto_partition": False})
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
alone = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
alone.load_state_dict(net.state_dict())
weft.set_partition(net[2], 1)
model = weft.DistributedModel(net)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

@weft.step
def train_step(model, x):
    loss = checkpoints.checkpoint(model, x, use_reentrant=False).square().mean()
    model.backward(loss)
    return loss

@weft.step
def with_function(model, x):
    return Double.apply(model(x))

x = torch.randn(4, 4)
alone(x).square().mean().backward()
train_step(model, x)
for name, parameter in model.local_named_parameters():
    assert torch.allclose(parameter.grad, alone.get_parameter(name[7:]).grad, atol=1e-6)
print("gradients are right")
try:
    with_function(model, x)
except UsageError as error:
    print("refused:", error)
"""


@one_day_in(2)
def test_what_fails_is_refused_and_the_rest_works():
    done = run_ranks(2, UNTESTED)
    assert done.stdout.count("gradients are right") == 2, done
    warning = (
        "PyTorch 2.99.0 has not been tested with this version of weft (2.11 to 2.15 have); what fails is refused: "
        "torch.autograd.Function between modules, functions of torch.jit.script between modules"
    )
    assert (done.stdout + done.stderr).count(warning) == 1
    refused = "torch.autograd.Function between modules: this does not work with PyTorch 2.99.0 ("
    assert done.stdout.count(f"refused: {refused}") == 2
    assert 'pip install "torch>=2.11,<2.16"' in done.stdout


@pytest.mark.parametrize("part", self_check.PARTS)
def test_a_part_that_is_wrong_is_found(part: str, monkeypatch: pytest.MonkeyPatch):
    """Each part sees numbers that differ from plain PyTorch's: here the second of two runs gives others."""
    run = self_check.PARTS[part]()
    calls: list[None] = []

    def altered(net: object, x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        result = run(net, x)
        return result if len(calls) == 1 else result * 2

    monkeypatch.setitem(self_check.PARTS, part, lambda: altered)
    assert "other than plain PyTorch's: " in self_check.try_out()[part]


def test_random_states_stay_as_they_were():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert self_check.try_out() == {}
    assert torch.equal(torch.get_rng_state(), before)
