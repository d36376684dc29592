"""A step that trains by a loss, and a job that trains a model over ranks and in one process, and compares both."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft.torch as weft
from weft.torch.delayed_parameters import materialise
from weft.torch.replicas.full_tensors import full_tensor
from weft.torch.session import current

STEPS = 3


def step_of(loss_of: Callable[..., Tensor], scaler: Any = None, **how: Any) -> Any:
    """A step that trains by ``loss_of(model, ...)`` and returns this loss; ``how``: as `weft.step` takes it."""

    @functools.wraps(loss_of)
    def step(model: Any, *batch: Any, **named: Any) -> Tensor:
        loss = loss_of(model, *batch, **named)
        model.backward(loss if scaler is None else scaler.scale(loss))
        return loss

    return weft.step(step, **how)


def squares(model: Any, x: Tensor) -> Tensor:
    """The mean square of what a model makes of its input."""
    return model(x).square().mean()


def mean_squared_error(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def distance_from_one(model: Any, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()


def next_rows(model: Any, x: Tensor) -> Tensor:
    """The distance of what a model makes of each row from the row before it, along dim 1."""
    return (model(x) - x.roll(1, 1)).square().mean()


def next_words(model: Any, words: Tensor) -> Tensor:
    """The usual loss of a model that gives scores for the next word."""
    scores = model(words)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def own_loss(model: Any, words: Tensor) -> Tensor:
    """The loss that a model of Hugging Face computes by itself."""
    return model(input_ids=words, labels=words).loss


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Its epsilon is large: it would turn rounding of small gradients into full steps."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-5)


class ByAllGradients(torch.optim.SGD):
    """Divides by the norm of the gradients of all weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad /= norm
        super().step()


def start(**settings: Any) -> None:
    """New settings for the models that come. One left over on some ranks only would take part in their steps."""
    gc.collect()
    weft.init({"microbatches": 2, **settings})


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made_late(make: Callable[[], nn.Module], late: bool = True) -> tuple[Any, Any]:
    """A model whose parameters are made late, and the same one that has them."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        with weft.delay_param_initialization(late):
            nets.append(make())
    if late:
        materialise(nets[1], lambda name: True, torch.device("cpu"), current.session().streams)
    return nets[0], nets[1]


class Job:
    """A model that trains over ranks, on the samples of this rank's replica; and alone, on all samples.

    ``batch_of``: the samples of all replicas, by a step's number. ``alone``: the model of one process, where a copy of
    ``net`` will not do. ``late``: the optimizer is made after the first backward pass. ``scale``: what losses are
    scaled by. ``decay``: what rates are multiplied by after each step. ``atol``: how far weights may be apart.
    """

    scaler: Any = None
    scheduler: Any = None
    atol = 1e-5

    def __init__(
        self, net: nn.Module, loss_of: Callable[..., Tensor], optimizer_of: Callable[..., Any] = adamw,
        batch_of: Callable[[int], Any] | None = None, *,
        alone: nn.Module | None = None, late: bool = False, scale: float = 0.0, decay: float = 0.0,
        atol: float = 1e-5,
    ) -> None:  # fmt: skip
        self.loss_of, self.optimizer_of, self.steps, self.atol = loss_of, optimizer_of, 0, atol
        self.batch = batch_of or self.batch
        self.alone = copy.deepcopy(net) if alone is None else alone
        self.plain = optimizer_of(self.alone.parameters())
        self.model = weft.DistributedModel(net)
        self.optimizer: Any = None if late else self.make_optimizer()
        self.scaler = weft.amp.GradScaler("cpu", init_scale=scale) if scale else None
        if decay:
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, decay)
            self.scheduler_alone = torch.optim.lr_scheduler.StepLR(self.plain, 1, decay)
        self.step = step_of(loss_of, self.scaler)

    def batch(self, number: int) -> Any:
        """The samples of all replicas in a step, where `batch_of` was not given."""
        raise NotImplementedError

    def whole(self, number: int) -> tuple[Tensor, ...]:
        batch = self.batch(number)
        return batch if isinstance(batch, tuple) else (batch,)

    def mine(self, number: int) -> list[Tensor]:
        """The samples of this rank's replica."""
        return [each.chunk(weft.rdp_size())[weft.rdp_rank()] for each in self.whole(number)]

    def make_optimizer(self) -> Any:
        return weft.DistributedOptimizer(self.optimizer_of(self.model.parameters()))

    def clip(self, most: float) -> Any:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def train(self, steps: int = STEPS, max_norm: float = 1e9, adding_up: int = 1) -> list[float]:
        """The losses of this rank's replica. ``adding_up``: backward passes before a step of the optimizer."""
        losses = []
        for _ in range(steps):
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            for number in range(self.steps, self.steps + adding_up):
                losses.append(self.step(self.model, *self.mine(number)).reduce_mean().item())
            self.optimizer = self.optimizer or self.make_optimizer()
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.norm = self.clip(max_norm)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step()
            self.steps += adding_up
        return losses

    def train_alone(
        self, steps: int = STEPS, max_norm: float = 1e9, adding_up: int = 1, first: int = 0
    ) -> list[float]:
        """The same in one process; the losses are those of this rank's replica, too."""
        losses = []
        for at in range(first, first + steps * adding_up, adding_up):
            self.plain.zero_grad()
            for number in range(at, at + adding_up):
                with torch.no_grad():
                    losses.append(self.loss_of(self.alone, *self.mine(number)).item())
                self.loss_of(self.alone, *self.whole(number)).backward()
            self.norm_alone = torch.nn.utils.clip_grad_norm_(self.alone.parameters(), max_norm)
            self.plain.step()
            if self.scheduler is not None:
                self.scheduler_alone.step()
        return losses

    def compare(self) -> None:
        """The whole states are those of one process.

        Adam's moments tell most: where a gradient is small, its step makes 1e-6 of rounding of 1e-8.
        """
        mine, theirs = self.model.state_dict(), dict(self.alone.state_dict())
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=self.atol)
        mine, theirs = self.optimizer.state_dict(), self.plain.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            torch.testing.assert_close(mine["state"][number], state, rtol=3e-4, atol=1e-7)

    def compare_gradients(self) -> None:
        """Those of this rank's parameters, put together, are those of one process."""
        for name, parameter in self.model.local_named_parameters():
            if parameter.requires_grad:
                expected = self.alone.get_parameter(name.removeprefix("module.")).grad
                torch.testing.assert_close(
                    full_tensor(parameter.grad, parameter), expected, rtol=1e-4, atol=1e-7
                )

    def trains_as_one_process(self, steps: int = STEPS, **how: Any) -> None:
        """Losses, the norm of the last gradients, and states."""
        assert self.train(steps, **how) == pytest.approx(self.train_alone(steps, **how), rel=1e-5)
        assert float(self.norm) == pytest.approx(float(self.norm_alone), rel=1e-5)
        self.compare()

    def clips_as_one_process(self) -> None:
        """Clipped gradients are those of the whole model, also for who asks for their norm alone."""
        self.trains_as_one_process(2, max_norm=0.05)
        mine, alone = (
            torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])
            for some in (self.model.local_parameters(), self.alone.parameters())
        )
        assert float(mine) == pytest.approx(float(alone), rel=1e-4)

    def has_norms_of_one_process(self) -> None:
        """After a step: 1-norm, 2-norm and the largest number of all gradients."""
        self.train(1)
        self.train_alone(1)
        for kind in (1.0, 2.0, float("inf")):
            mine, alone = (
                torch.nn.utils.clip_grad_norm_(each.parameters(), 1e9, kind)
                for each in (self.model, self.alone)
            )
            assert float(mine) == pytest.approx(float(alone), rel=1e-4), kind

    def gives_its_states_to(self, make: Callable[[], Job]) -> dict[str, Tensor]:
        """Another job like this one, given what this one has after two steps, goes on as it does; that state."""
        self.train(2)
        state, states = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        assert state.keys() == self.alone.state_dict().keys()
        other = make()
        other.train(1)
        other.model.load_state_dict(state)
        other.optimizer.load_state_dict(states)
        other.steps = self.steps
        assert other.train(1) == pytest.approx(self.train(1), rel=1e-6)
        torch.testing.assert_close(other.model.state_dict(), self.model.state_dict(), rtol=1e-6, atol=1e-7)
        return state

    def goes_to_other_layouts(self, folder: Path) -> None:
        """The first layout saves; it, and all others that go on from there, train as one process does."""
        full = folder.with_name(f"{folder.name}-full")
        if not (folder / "newest").exists():
            self.train(2)
            weft.save_checkpoint(folder, "two", model=self.model, optimizer=self.optimizer)
            weft.save_checkpoint(full, "two", partial=False, model=self.model)
        else:
            weft.resume_from_checkpoint(folder, "two", model=self.model, optimizer=self.optimizer)
            self.steps = 2
        self.train_alone(2)
        assert self.train(2) == pytest.approx(self.train_alone(2, first=2), rel=1e-5)
        self.compare()
        saved, state = torch.load(full / "two"), self.model.state_dict()
        assert {name: value.shape for name, value in saved.items()} == {n: v.shape for n, v in state.items()}
