"""What an optimizer looks at: each number, a weight, or several weights."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from weft.torch.calls.placeholders import placeholder
from weft.torch.replicas.optimizer_trials import (
    _halves_are_alike,
    _tried,
    looks_at_several,
    updates_parts_alike,
    updates_weights_alone,
)

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
                if weight.grad is None:
                    continue
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


class Projected(Signs):
    """By the norm where a gradient is orthogonal to its weight, as AdamP."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            flat = weight.grad.flatten(), weight.flatten()
            if torch.cosine_similarity(*flat, 0).abs() < 0.01:
                weight.grad /= weight.norm()
        super().step()


class Broken(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("it wants its own weights")


@pytest.mark.parametrize(
    ("kind", "alike"),
    [(Signs, True), (ByNorm, False), (ByRows, False), (ByColumns, False), (Later, False), (Projected, False)],
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
    assert updates_parts_alike(optimizer) and _tried(_halves_are_alike, optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_some_of_pytorch_take_whole_weights(name: str) -> None:
    optimizer = getattr(torch.optim, name)(WEIGHT, lr=0.1)
    assert not updates_parts_alike(optimizer) and not _tried(_halves_are_alike, optimizer)


class ByAll(Signs):
    """Divides by the norm of the gradients of all weights."""

    def step(self, closure: Any = None) -> None:
        self.norm = sum(weight.grad.norm() for group in self.param_groups for weight in group["params"])
        super().step()

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return 1 / self.norm


class Clipped(ByAll):
    """Divides large ones alone."""

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return 1 / self.norm.clamp(min=100.0)


class Estimating(Signs):
    """Sums up over all weights, and needs many steps until that matters, as D-Adaptation."""

    def step(self, closure: Any = None) -> None:
        super().step()
        (group,) = self.param_groups
        group["sum"] = group.get("sum", torch.zeros(1)) + sum(weight.grad.sum() for weight in group["params"])
        group["lr"] = max(group["lr"], float(group["sum"]) * 1e-9)


class Drawing(Signs):
    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.rand(())


class Named(Signs):
    """Keeps a number for all weights among its states, and a type among its attributes."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.state["total"] = 1
        self.kind = torch.float32

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        self.state["total"] += 1
        return torch.ones((), dtype=self.kind)


class Grouped(Signs):
    """By the norm in the groups that say so."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["by_norm"] else ():
                if weight.grad is not None:
                    weight.grad /= weight.grad.norm()
        super().step()


def test_groups_of_unlike_settings_are_tried_each() -> None:
    groups = [
        {"params": [nn.Parameter(torch.ones(4, 6))], "by_norm": n == 7, "lr": 0.1 / (n + 1)} for n in range(9)
    ]
    assert not updates_parts_alike(Grouped(groups)) and updates_weights_alone(Grouped(groups))
    assert updates_parts_alike(Grouped(groups[:7]))


class Seeded(Signs):
    """Knows something of each weight since it was made."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        for number, weight in enumerate(self.param_groups[0]["params"]):
            self.state[weight]["seed"] = number + 1

    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.grad *= self.state[weight]["seed"] / weight.grad.norm()
        super().step()


def test_states_that_are_there_from_the_start_are_there_in_trials() -> None:
    optimizer = Seeded(WEIGHT)
    assert not updates_parts_alike(optimizer) and updates_weights_alone(optimizer)
    assert dict(optimizer.state[WEIGHT[0]]) == {"seed": 1}


class Clock:
    ticks = 0


class Counting(Signs):
    """Slower with each call, which it counts where nobody sees it."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights)
        self.clock = Clock()

    def step(self, closure: Any = None) -> None:
        self.clock.ticks += 1
        for group in self.param_groups:
            held = [weight for weight in group["params"] if weight.grad is not None]
            group["params"], everything = held, group["params"]
            super().step()
            group["params"] = everything

    def scale(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.ones(()) / self.clock.ticks


def test_one_that_counts_its_calls_updates_all_weights_in_one() -> None:
    optimizer = Counting(WEIGHT)
    assert not updates_weights_alone(optimizer) and not looks_at_several(optimizer)
    assert updates_parts_alike(optimizer) and not optimizer.clock.ticks


@pytest.mark.parametrize("kind", [Signs, ByNorm, ByRows, Named])
def test_each_weight_for_itself(kind: type[Signs]) -> None:
    optimizer = kind(WEIGHT)
    assert updates_weights_alone(optimizer) and not looks_at_several(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [ByAll, Clipped, Estimating])
def test_those_that_look_at_several_weights(kind: type[Signs], dtype: torch.dtype) -> None:
    optimizer = kind([nn.Parameter(torch.ones(4, 6, dtype=dtype))])
    assert looks_at_several(optimizer) and not updates_weights_alone(optimizer)
    assert not updates_parts_alike(optimizer) and optimizer.param_groups[0]["lr"] == 0.1


def test_of_pytorchs_own_lbfgs_alone_does() -> None:
    assert looks_at_several(torch.optim.LBFGS(WEIGHT)) and not updates_weights_alone(
        torch.optim.LBFGS(WEIGHT)
    )
    assert updates_weights_alone(torch.optim.Muon(WEIGHT, lr=0.1))


@pytest.mark.parametrize(("kind", "why"), [(Broken, "it wants its own weights"), (Drawing, "random numbers")])
def test_one_that_trials_say_nothing_of(
    kind: type[Signs], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = kind(WEIGHT)
    with caplog.at_level(logging.WARNING, "weft"):
        assert not updates_weights_alone(optimizer) and not looks_at_several(optimizer)
    assert caplog.text.count(why) == 1


def test_the_first_parameter_may_be_another_ranks() -> None:
    """A placeholder computes nothing here; trials ask for its type and place alone."""
    weights = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    placeholder(weights[0], 1, "first.weight")
    assert updates_weights_alone(Signs(weights)) and updates_parts_alike(Signs(weights))
    assert looks_at_several(ByAll(weights)) and not updates_parts_alike(ByNorm(weights))
