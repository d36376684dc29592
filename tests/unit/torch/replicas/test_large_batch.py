"""The rules for large batches, against the paper's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import ConfigError, UsageError
from weft.torch.replicas.data_check import difference, fingerprint
from weft.torch.replicas.large_batch import WarmUp, correct_momentum, decay_groups, scale_lr


class Contained(torch.optim.Optimizer):
    """The paper's equation 10: the momentum contains the learning rate."""

    def __init__(self, parameters: Any, lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad, alpha=group["lr"])
                parameter.sub_(velocity)


def trained(optimizer_of: Any, rates: list[float], correct: bool) -> Tensor:
    """Five weights after steps with these rates."""
    weight = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
    optimizer = optimizer_of([weight], lr=rates[0], momentum=0.9)
    if correct:
        correct_momentum(optimizer, "velocity")
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    return weight.detach()


def test_momentum_that_contains_the_rate_follows_it():
    """With the correction, equation 10 does what equation 9, PyTorch's SGD, does."""
    rates = [0.01, 0.02, 0.02, 0.1, 0.05, 0.05]
    expected = trained(torch.optim.SGD, rates, False)
    assert torch.allclose(trained(Contained, rates, True), expected, rtol=1e-12)
    assert not torch.allclose(trained(Contained, rates, False), expected, rtol=1e-3)


def test_the_correction_can_be_ended_and_is_not_for_sgd():
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="torch.optim.SGD needs no momentum correction"):
        correct_momentum(torch.optim.SGD([weight], lr=0.1))
    optimizer = Contained([weight], lr=0.1, momentum=0.9)
    handle = correct_momentum(optimizer, "velocity")
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_linear_scaling_and_warm_up():
    lr = scale_lr(0.1, 32, base_batch_size=256, replicas=64)
    assert lr == pytest.approx(0.8)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)
    schedule = WarmUp(optimizer, steps=7, factor=8)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.1 * (step + 1) for step in range(8)] + [0.8, 0.8])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(4, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.BatchNorm2d(3), nn.RMSNorm(3)])


def test_biases_and_normalisation_do_not_decay():
    model = Mixed()
    decayed, exempt = decay_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and exempt["weight_decay"] == 0
    assert {names[id(p)] for p in decayed["params"]} == {
        "embedding.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)
    torch.optim.AdamW([decayed, exempt], lr=0.1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: scale_lr(0.1, 0, replicas=2), "batch_size is 0, it must be above 0"),
        (lambda: scale_lr(-1, 1, 0, replicas=2), "lr is -1, it must be above 0; base_batch_size is 0"),
        (lambda: WarmUp(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), 0, 2), "steps=0 and factor=2"),
        (lambda: WarmUp(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1), 5, 0.5), "factor=0.5"),
        (lambda: decay_groups(nn.Linear(1, 1), -0.1), "weight_decay is -0.1, it must be at least 0"),
    ],
)
def test_faulty_numbers(call, text):
    with pytest.raises(ConfigError, match=text):
        call()


def test_fingerprints_are_of_the_values():
    batch = {"x": torch.arange(3), "y": [torch.zeros(2)]}
    assert fingerprint(batch) == fingerprint({"x": torch.arange(3), "y": [torch.zeros(2)]})
    other = {"x": torch.arange(3) + 1, "y": [torch.zeros(2)]}
    assert len({fingerprint(b) for b in (batch, other, {"x": torch.arange(3.0)}, "text", "texts")}) == 5


@pytest.mark.parametrize(
    ("prints", "replicas", "text"),
    [
        ("aabb", (0, 0, 1, 1), ""),
        ("abab", (0, 1, 0, 1), ""),
        ("abbb", (0, 0, 1, 1), "ranks 0 and 1 belong to one replica, but their first batches differ"),
        ("aaaa", (0, 0, 1, 1), "the replicas 0 and 1 .dp_rank. have the same first batch"),
        (" a", (0, 1), "the data loader of rank 0 has no batch"),
    ],
)
def test_what_loaders_have_wrong(prints, replicas, text):
    found = difference(list(prints), replicas)
    assert bool(found) == bool(text) and text.replace(".dp_rank.", "(dp_rank)") in found
    assert not text or "no batch" in text or "num_replicas=weft.dp_size(), rank=weft.dp_rank()" in found
