"""Which optimizers may be given parts of weights: by their names, or tried."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from weft.torch.replicas.part_updates import _tried, updates_parts_alike

WEIGHT = [nn.Parameter(torch.ones(4, 6))]


class Signs(torch.optim.Optimizer):
    """Each number for itself, with a momentum."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                state["mean"] = 0.9 * state.get("mean", 0.0) + weight.grad
                weight -= group["lr"] * state["mean"].sign() * self.scale(weight.grad)


class ByNorm(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return 1 / gradient.norm()


class ByRows(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.square().mean(1, keepdim=True)


class ByColumns(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.square().mean(0, keepdim=True)


class Later(Signs):
    """By the norm, from its third step on."""

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        return 1 / gradient.norm() if self.steps > 2 else torch.ones(())


class Broken(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it wants its own weights")


@pytest.mark.parametrize(
    ("kind", "alike"), [(Signs, True), (ByNorm, False), (ByRows, False), (ByColumns, False), (Later, False)]
)
def test_an_optimizer_of_ones_own_is_tried(kind: type[Signs], alike: bool) -> None:
    optimizer = kind(WEIGHT)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert updates_parts_alike(optimizer) == alike
    assert (
        not calls
        and not optimizer.state
        and torch.equal(WEIGHT[0], torch.ones(4, 6))
        and scheduler.last_epoch == 0
    )
    assert "steps" not in vars(optimizer)


def test_one_that_cannot_be_tried_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert updates_parts_alike(Broken(WEIGHT)) and "it wants its own weights" in caplog.text


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"]
)
def test_those_of_pytorch_are_what_their_names_say(name: str) -> None:
    optimizer = getattr(torch.optim, name)(WEIGHT, lr=0.1)
    assert updates_parts_alike(optimizer) and _tried(optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_some_of_pytorch_take_whole_weights(name: str) -> None:
    optimizer = getattr(torch.optim, name)(WEIGHT, lr=0.1)
    assert not updates_parts_alike(optimizer) and not _tried(optimizer)
