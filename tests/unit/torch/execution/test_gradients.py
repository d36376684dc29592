"""What a step cannot do with gradients is refused by name, on a split model; what one partition makes of a loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import weft.torch as weft
from tests.launching import run_ranks

PROGRAM = """
import torch, weft.torch as weft
from torch import nn
weft.init({{"partitions": {partitions}, "microbatches": 2, "auto_partition": False, "wait_timeout": 30}})
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
weft.set_partition(net[2], 1), weft.set_partition(net[4], {last})
outside = nn.Parameter(torch.ones(4))
class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outside = [outside]
    def forward(self, x):
        return self.inner(x) * self.outside[0]
class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, given):
        return self.inner(given.x) * given.scale
{before}
model = weft.DistributedModel(net)
@weft.step
def step(model, x):
    backward = model.backward
    leaf = x.detach().clone().requires_grad_()
    {body}
    return leaf
for _ in range(2):
    step(model, torch.randn(4, 4))
print("passed", flush=True)
"""

REFUSED = {
    "through what was freed": (
        "h = net[2](net[1](net[0](x))); "
        "backward(h.mean(), retain_graph=weft.is_tracing()); backward(net[4](net[3](h)).mean())",
        "",
        "backward through the graph a second time|backward() reaches what an earlier backward pass",
    ),
    "through what was freed on another rank": (
        "h = net[1](net[0](x)); a = net[2](h); b = net[2](-h); "
        "backward(a.mean(), retain_graph=weft.is_tracing()); backward(b.mean())",
        "",
        "backward() reaches what an earlier backward pass",
    ),
    "second derivative across ranks": (
        "g, = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True); backward(g.norm())",
        "",
        "needs a second derivative through modules on several partitions",
    ),
    "second derivative of an activation": (
        "h = net[0](x); g, = torch.autograd.grad(net[4](net[3](net[2](h))).sum(), h, create_graph=True, "
        "allow_unused=True); backward(g.norm())",
        "",
        "needs a second derivative through modules on several partitions",
    ),
    "second derivative before the model": (
        "g, = torch.autograd.grad(net[0](leaf.pow(3)).square().sum(), leaf, create_graph=True); backward(g.norm())",
        "",
        "the step itself computes from a tensor of shape [2, 4]",
    ),
    "backward with create_graph": (
        "model(x).mean().backward(create_graph=True)",
        "",
        "backward() takes no create_graph and no inputs",
    ),
    "backward for chosen inputs": (
        "torch.autograd.backward(model(x).mean(), inputs=[net[0].weight])",
        "",
        "backward() takes no create_graph and no inputs",
    ),
    "an unused input": (
        "torch.autograd.grad(net[0](leaf).sum(), net[4].weight); backward(model(x).mean())",
        "",
        "one of the inputs has nothing to do|appears to not have been used",
    ),
    "an input without gradient": (
        "torch.autograd.grad(model(x).sum(), x)",
        "",
        "input that needs no gradient|does not require grad",
    ),
    "a tensor inside of an object": (
        "import types; backward(net[2](types.SimpleNamespace(x=net[0](x), scale=leaf)).mean())",
        "net[2] = Takes(); weft.set_partition(net[2], 1)",
        "net.2 gets a tensor of shape [2, 4] that needs a gradient inside of an object|2 gets a tensor of shape [2, 4]",
    ),
    "a parameter that a module knows by itself": (
        "backward(model(x).mean())",
        "net[2] = Uses(); weft.set_partition(net[2], 1)",
        "uses a trainable parameter of shape [4] which is none of the model's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str):
    body, before, text = REFUSED[name]
    program = PROGRAM.format(partitions=2, last=0, body=body, before=before)
    done = run_ranks(2, program, warm=True)
    told = done.stdout + done.stderr
    assert done.returncode and "passed" not in told
    assert any(each in told for each in text.split("|")), told


def test_parameters_outside_are_refused_with_copies_of_the_model():
    body = "backward((model(x + outside)).mean())"
    done = run_ranks(4, PROGRAM.format(partitions=2, last=0, body=body, before=""), warm=True)
    assert done.returncode
    assert (
        "a trainable parameter of shape [4] outside of the model gets a gradient, but"
        in done.stdout + done.stderr
    )


@pytest.mark.parametrize("how", ["model", "loss", "autograd", "twice", "chosen"])
def test_one_partition_weighs_a_loss_alike_however_it_goes_backward(how: str):
    weft.init({"partitions": 1, "microbatches": 4})
    net = nn.Linear(4, 2)
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)

    @weft.step
    def step(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        if how == "model":
            model.backward(loss)
        elif how == "loss":
            loss.backward()
        elif how == "autograd":
            torch.autograd.backward([loss])
        elif how == "twice":
            loss.mul(0.5).backward(retain_graph=True)
            model.backward(loss * 0.5, retain_graph=True)
        else:
            loss.backward(inputs=[net.weight, net.bias], create_graph=False)

    x = torch.randn(8, 4)
    step(model, x)
    alone(x).square().mean().backward()
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    net.zero_grad()
    net(x).square().mean().backward()  # outside of a step it is PyTorch's
    torch.testing.assert_close(net.weight.grad, alone.weight.grad)
