"""Modules that a `torch.autograd.Function` calls, in its forward pass and again in its backward pass."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import step_of
from weft.errors import WeftError

from .harness import WIDTH, check, same_as_alone, seeded, sgd, squared_error, start, vectors


class Reversible(torch.autograd.Function):
    """Layers that recompute their inputs from their results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            for f, g in layers:
                a = a + f(b)
                b = b + g(a)
        ctx.save_for_backward(a, b)
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a, b), (da, db) = ctx.saved_tensors, grad.chunk(2, -1)
        for f, g in reversed(ctx.layers):
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                y = g(a)
                y.backward(db)
            b, da = b - y.detach(), da + a.grad
            with torch.enable_grad():
                b = b.detach().requires_grad_()
                y = f(b)
                y.backward(da)
            a, db = a.detach() - y.detach(), db + b.grad
            b = b.detach()
        return torch.cat([da, db], -1), None


class Again(torch.autograd.Function):
    """Runs a function again in the backward pass: an activation checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.function(x).backward(grad)
        return None, x.grad


def pairs(count: int) -> nn.ModuleList:
    half = WIDTH // 2
    return nn.ModuleList(
        nn.ModuleList([nn.Sequential(nn.Linear(half, half), nn.Tanh()), nn.Linear(half, half)])
        for _ in range(count)
    )


class Net(nn.Module):
    """Reversible layers between two others, `stacks` of them after each other."""

    def __init__(self, stacks: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stacks = nn.ModuleList(pairs(2) for _ in range(stacks))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layers in self.stacks:
            x = Reversible.apply(x, layers)
        return self.last(x)  # type: ignore[no-any-return]


class Inside(nn.Module):
    """A module that gives its own parts to a function, or a method of its own (`bound`)."""

    def __init__(self, bound: bool) -> None:
        super().__init__()
        self.bound = bound
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def run(self, x: Tensor) -> Tensor:
        return self.part(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return Again.apply(self.run if self.bound else self.part, x)  # type: ignore[no-any-return]


def two(bound: bool) -> nn.Module:
    """The function's input has to need a gradient, in one process too."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Inside(bound), Inside(bound))


def under() -> nn.Module:
    """The whole model calls its parts in a function."""
    return models.Composed(
        lambda net, x: Again.apply(lambda x: net.last(x), net.norm(net.first(x))),
        norm=nn.BatchNorm1d(WIDTH),
        first=nn.Linear(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, WIDTH),
    )


@check
def reversible_layers_split_automatically() -> None:
    """They lie together; what is around them goes elsewhere."""
    same_as_alone(seeded(Net), vectors())
    same_as_alone(seeded(Net, 3), vectors())


@check
def reversible_layers_on_the_last_partition() -> None:
    """The function runs where its modules are, whatever its input's place."""
    same_as_alone(seeded(Net), vectors(), places={"stacks": 1})
    same_as_alone(seeded(Net), vectors(), places={"first": 1, "last": 1})


@check
def stacks_of_reversible_layers_on_both_partitions() -> None:
    same_as_alone(seeded(Net, 2), vectors(), places={"stacks.0": 1, "last": 1})


@check
def a_function_that_gets_a_module() -> None:
    same_as_alone(seeded(two, False), vectors())
    same_as_alone(seeded(two, False), vectors(), places={"2.part": 1})


@check
def a_function_that_calls_modules_it_was_not_given() -> None:
    """The module around it stays whole by itself, and that is told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("weft").addHandler(handler)
    try:
        same_as_alone(seeded(two, True), vectors())
        same_as_alone(seeded(under), vectors())
    finally:
        logging.getLogger("weft").removeHandler(handler)
    if weft.rank() == 0:
        assert any(
            text.startswith("1 calls modules in the torch.autograd.Function Again") for text in told
        ), told


@check
def modules_of_a_function_placed_apart_are_refused() -> None:
    net = seeded(Net)
    start(auto_partition=False)
    weft.set_partition(net.stacks[0][1], 1)
    model = weft.DistributedModel(net)
    sgd(model.parameters())
    step = step_of(squared_error)
    told = ""
    try:
        step(model, vectors(steps=1)[0])
    except WeftError as error:
        told = str(error)
    assert "Reversible" in told and "partitions 0, 1: stacks.0.0.0" in told, told
    del model, net, step
    gc.collect()  # the error's frames hold the model, which would take part in the next steps of one rank only


@check
def a_whole_model_called_twice_sees_microbatches_in_order() -> None:
    """Its buffers are those of one process, as those of a part are."""

    def twice(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"]) + F.mse_loss(model(batch["y"]), batch["x"])

    same_as_alone(seeded(under), vectors(), twice)


class Swapping(nn.Module):
    """Calls a part with parameters that are none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        named = {name: parameter * 1.1 for name, parameter in self.more.named_parameters()}
        return torch.func.functional_call(self.more, named, (x,)).tanh()


@check
def modules_called_with_other_parameters_stay_with_their_caller() -> None:
    def net() -> nn.Module:
        return models.Stack(
            layers=nn.Sequential(nn.Linear(WIDTH, WIDTH), Swapping(), nn.Linear(WIDTH, WIDTH), Swapping())
        )

    for pipeline in ("1f1b", "gpipe"):
        same_as_alone(seeded(net), vectors(), pipeline=pipeline)
