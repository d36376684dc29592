"""Optimizers that look at whole weights, where ranks have parts; started by `test_whole_updates.py`.

    whole_updates.py --folder FOLDER --partitions 2 check...       with the settings of the layout in WEFT_SET

Every rank asserts for itself; a job that ends well has passed. All is computed in double precision: Muon rounds to 16
bits, which makes much of the smallest difference.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import weft.torch as weft
from tests.parity import experts, in_parts
from tests.parity.registry import Checks
from weft.errors import UsageError
from weft.torch.tensor_parallel import is_cut

CHECKS = Checks()
given = CHECKS.given
ROWS, STEPS = 8, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-9}


class Own(Optimizer):
    """Adam for what is no matrix; what a matrix is updated by is the subclass's."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    update = self.direction(weight, weight.grad, self.state[weight], group["eps"])
                    weight.add_(update, alpha=-group["lr"])

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        raise NotImplementedError


def adam(grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
    if not state.get("count"):
        state |= {"count": 0, "first": torch.zeros_like(grad), "second": torch.zeros_like(grad)}
    state["count"] += 1
    state["first"].lerp_(grad, 0.1)
    state["second"].lerp_(grad.square(), 0.01)
    return state["first"] / (state["second"].sqrt() + eps)


class Lamb(Own):
    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        update = adam(grad, state, eps) + 0.1 * weight
        return update * (weight.norm() + 1) / (update.norm() + eps)


class Lars(Own):
    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        state["momentum"] = state.get("momentum", 0) * 0.9 + grad
        return state["momentum"] * (weight.norm() + 1) / (grad.norm() + eps)


class Shampoo(Own):
    """Its two states of a square half of a weight have the shape of that half."""

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        if grad.ndim != 2:
            return adam(grad, state, eps)
        for name, square in (("rows", grad @ grad.T), ("columns", grad.T @ grad)):
            state[name] = state.get(name, 1e-3 * torch.eye(len(square))) + square
        return _power(state["rows"], -0.25) @ grad @ _power(state["columns"], -0.25)


class Soap(Own):
    """Adam in the basis of Shampoo's matrices."""

    def direction(self, weight: Tensor, grad: Tensor, state: dict[str, Any], eps: float) -> Tensor:
        if grad.ndim != 2:
            return adam(grad, state, eps)
        for name, square in (("rows", grad @ grad.T), ("columns", grad.T @ grad)):
            state[name] = state.get(name, 0) * 0.9 + square + 1e-3 * torch.diag(torch.arange(len(square)))
        left, right = (torch.linalg.eigh(state[name])[1] for name in ("rows", "columns"))
        left, right = (each * each.sum(0).sign() for each in (left, right))  # one of two signs
        return left @ adam(left.T @ grad @ right, state, eps) @ right.T


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values**exponent @ vectors.T


def matrices_first(module: nn.Module) -> list[dict[str, Any]]:
    weights = list(module.parameters())
    matrices = [weight for weight in weights if weight.ndim == 2]
    return [{"params": matrices}, {"params": [w for w in weights if w.ndim != 2], "lr": 0.02}]


def muon(module: nn.Module) -> list[Optimizer]:
    matrices, rest = matrices_first(module)
    return [torch.optim.Muon([matrices], lr=0.01), torch.optim.AdamW([rest])]


KINDS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "Muon": muon,
    "Adafactor": lambda module: [torch.optim.Adafactor(matrices_first(module), lr=0.01)],
    "LAMB": lambda module: [Lamb(matrices_first(module))],
    "LARS": lambda module: [Lars(matrices_first(module))],
    "Shampoo": lambda module: [Shampoo(matrices_first(module))],
    "SOAP": lambda module: [Soap(matrices_first(module))],
}


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def loss_of_numbers(model: Any, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def loss_of_words(model: Any, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def words_net() -> nn.Module:
    torch.manual_seed(0)
    return in_parts.Words(tied=True)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "linears": (in_parts.network, lambda n: numbers(n, ROWS, in_parts.WIDTH), loss_of_numbers),
    "words": (words_net, in_parts.words_of, loss_of_words),
    "experts": (experts.network, lambda n: numbers(n, ROWS, 5, experts.WIDTH), loss_of_numbers),
}


class Job:
    """A model and the optimizers that train it; and the same in one process, on all samples."""

    def __init__(self, kind: str, net: str = "linears", **settings: Any) -> None:
        gc.collect()
        experts_are = {"experts": "expert_parallel"} if net == "experts" else {}
        given_settings = {"partitions": given.partitions, "microbatches": 2, "verify": "off"}
        weft.init({**given_settings, **experts_are, **settings})
        make, self.batch, self.loss = NETS[net]
        module = make()
        self.alone = copy.deepcopy(module)
        self.model = weft.DistributedModel(module)
        self.optimizers = [weft.DistributedOptimizer(each) for each in KINDS[kind](self.model)]
        self.plain = KINDS[kind](self.alone)
        self.steps = 0

        @weft.step
        def step(model: nn.Module, x: Tensor) -> Tensor:
            loss = self.loss(model, x)
            model.backward(loss)
            return loss

        self.step = step

    def train(self, steps: int = STEPS, before: Callable[[nn.Module], object] = lambda module: None) -> None:
        """The same number of steps of both."""
        for _ in range(steps):
            x = self.batch(self.steps)
            for optimizer in (*self.optimizers, *self.plain):
                optimizer.zero_grad()
            self.step(self.model, x.chunk(weft.rdp_size())[weft.rdp_rank()])
            self.loss(self.alone, x).backward()
            before(self.model.module)
            before(self.alone)
            for optimizer in (*self.optimizers, *self.plain):
                optimizer.step()
            self.steps += 1

    def compare(self) -> None:
        """The whole weights and states are those of one process."""
        torch.testing.assert_close(self.model.state_dict(), dict(self.alone.state_dict()), **CLOSE)
        for mine, plain in zip(self.optimizers, self.plain, strict=True):
            found, expected = mine.state_dict(), plain.state_dict()
            assert found["param_groups"] == expected["param_groups"]
            assert found["state"].keys() == expected["state"].keys()
            for number, state in expected["state"].items():
                torch.testing.assert_close(found["state"][number], state, **CLOSE)


@CHECKS.of_each(*(f"{kind} {net}" for kind in KINDS for net in NETS))
def steps_are_those_of_one_process(which: str) -> None:
    job = Job(*which.split())
    job.train()
    assert any(map(is_cut, job.model.local_parameters()))
    job.compare()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: torch.set_default_dtype(torch.float64))
