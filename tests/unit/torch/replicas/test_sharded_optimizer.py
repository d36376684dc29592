"""Shares of an optimizer's state, and optimizers that update parts of a weight as they would the whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.torch.gathering.layers import blocks
from weft.torch.replicas.sharded_optimizer import (
    Shares,
    _tried,
    by_parameter,
    tensors_and_plain,
    updates_parts_alike,
    updates_weights_alone,
)


def made(replica: int = 0, replicas: int = 3) -> Shares:
    group: Any = None
    return Shares(group, replica, replicas)


def numbers_of(parameters: list[Tensor], local: list[bool]) -> list[list[int]]:
    shares = [made(replica) for replica in range(3)]
    for share in shares:
        share.extend(parameters, local)
    return [[n for n in range(len(parameters)) if share.has(n)] for share in shares]


def test_shares_are_about_equal_and_every_parameter_has_one():
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(size)) for size in (5, 9, 1, 4, 8, 3)]
    assert numbers_of(parameters, [True] * 6) == [[1, 2], [4, 5], [0, 3]]  # 10, 11 and 9 elements


def test_frozen_and_remote_parameters_are_no_load():
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(4)) for _ in range(9)]
    for frozen in parameters[:3]:
        frozen.requires_grad_(False)
    local = [True] * 6 + [False] * 3
    for mine in numbers_of(parameters, local):
        assert len([n for n in mine if n < 3]) == len([n for n in mine if 3 <= n < 6]) == 1


def test_later_parameters_change_no_share():
    first: list[Tensor] = [nn.Parameter(torch.zeros(size)) for size in (6, 4, 2)]
    shares = made()
    shares.extend(first, [True] * 3)
    before = [shares.has(n) for n in range(3)]
    shares.extend([*first, nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(100))], [True] * 5)
    assert [shares.has(n) for n in range(3)] == before


def test_states_are_taken_apart_and_put_together():
    entries = {3: {"step": 2, "exp_avg": torch.ones(2)}, 1: {"exp_avg": torch.zeros(1)}}
    tensors, plain = tensors_and_plain(entries)
    assert set(tensors) == {"3/exp_avg", "1/exp_avg"} and plain == {"3/step": 2}
    back = by_parameter({**tensors, **plain})
    assert list(back) == [1, 3] and back[3]["step"] == 2 and back[3]["exp_avg"] is entries[3]["exp_avg"]


def test_blocks_are_layers_of_a_kind_that_share_nothing():
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))

    net = nn.Module()
    net.layers = nn.ModuleList([layer(), layer(), layer()])
    net.lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(2, 2)])])
    net.one = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    net.head = nn.Linear(2, 2)
    net.head.weight = net.layers[2][0].weight
    assert blocks(net) == [net.layers[0], net.layers[1], net.layers[2][2]]
    assert blocks(nn.Sequential(nn.Tanh(), nn.Tanh())) == []


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


class Factored(Signs):
    """Asks for a number that it does not pickle, as those of PyTorch do on a GPU."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.factor = 2.0

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return super().scale(gradient) * self.factor

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "factor"}


def test_numbers_that_are_not_pickled_are_there_when_it_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        assert updates_parts_alike(Factored(WEIGHT)) and updates_weights_alone(Factored(WEIGHT))
    assert not caplog.text


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
