"""The first step rehearses a microbatch on one rank to measure it: nothing of that is left behind."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.parity.compare import device
from tests.training import squares, step_of

from .harness import MICROBATCHES, WIDTH, check, seeded, start, vectors

calls = 0
seen: list[int] = []


class Book:
    """What a script may count in an object of its own."""

    def __init__(self) -> None:
        self.rows = 0
        self.by_kind: dict[str, list[int]] = defaultdict(list)


def model_of(net: nn.Module) -> Any:
    start()
    return weft.DistributedModel(net)


@check
def what_the_step_function_counts() -> list[Any]:
    """In lists, sets, dicts, objects, closures and globals: as often as there are microbatches, on every rank."""
    global calls
    calls = 0
    seen.clear()
    net, book, times = seeded(models.Chain), Book(), 0
    losses: list[float] = []
    recent: deque[int] = deque(maxlen=3)
    shapes: set[Any] = set()
    kinds: Counter[str] = Counter()
    names = SimpleNamespace(last="")
    total = torch.zeros(1)
    model = model_of(net)

    @weft.step
    def step(model: nn.Module, batch: Any, book: Book) -> Tensor:
        nonlocal times
        global calls
        calls += 1
        times += 1
        seen.append(len(seen))
        recent.append(times)
        kinds["a"] += 1
        names.last += "x"
        book.rows += len(batch["x"])
        book.by_kind["y"].append(times)
        total.add_(1)
        shapes.add((tuple(batch["x"].shape), times))
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        losses.append(loss.item())
        model.backward(loss)
        return loss

    for number, batch in enumerate(vectors(steps=2), 1):
        step(model, batch, book)
        many = number * MICROBATCHES
        assert (calls, times, len(losses), len(seen), kinds["a"], names.last) == (many,) * 5 + ("x" * many,)
        assert list(recent) == [many - 2, many - 1, many] and len(shapes) == many and total.item() == many
        assert book.rows == many * 2 and book.by_kind["y"] == list(range(1, many + 1))
    return [calls, times, seen]


@check
def inputs_written_by_the_step() -> list[float]:
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    model = model_of(net)

    @weft.step
    def step(model: nn.Module, batch: Any) -> Tensor:
        batch["x"].mul_(2).add_(1)
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        model.backward(loss)
        return loss

    told = []
    for batch in vectors(steps=2):
        x = batch["x"] * 2 + 1
        loss = step(model, batch).reduce_mean()
        torch.testing.assert_close(batch["x"], x)
        torch.testing.assert_close(loss, F.mse_loss(alone(x), batch["y"]).detach(), rtol=1e-5, atol=0.0)
        told.append(loss.item())
    return told


@check
def inputs_that_get_what_modules_compute() -> None:
    """The trace runs the step several times, and none goes on from the graph of another."""
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    model = model_of(net)

    def body(net: Any, x: Tensor, y: Tensor) -> Tensor:
        h = net(x * 1.0)
        part = x[:, 1:3]
        part += h.mean()
        return F.mse_loss(h, y)

    step = step_of(body)
    for batch in vectors(steps=2):
        x, y = batch["x"], batch["y"]
        losses = [body(alone, a.clone(), b).detach() for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
        torch.testing.assert_close(step(model, x, y).outputs, losses, rtol=1e-5, atol=0.0)


@check
def gradients_that_inputs_and_outside_tensors_had() -> list[Any]:
    net, head = seeded(models.Chain), seeded(nn.Linear, WIDTH, 3)
    alone, alone_head = copy.deepcopy(net), copy.deepcopy(head)
    prompt = torch.ones(WIDTH, device=device(), requires_grad=True)
    prompt.grad = torch.full_like(prompt, 5.0)
    head.weight.grad = torch.full_like(head.weight, 2.0)
    held = prompt.grad
    model = model_of(net)

    step = step_of(lambda model, x: head(model(x + prompt)).square().mean())
    x = vectors()[0]["x"].to(device()).requires_grad_()
    x.grad = torch.full_like(x, 3.0)
    step(model, x)
    other, same = torch.ones(WIDTH, device=device(), requires_grad=True), x.detach().clone().requires_grad_()
    alone_head(alone(same + other)).square().mean().backward()
    torch.testing.assert_close(x.grad - 3, same.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prompt.grad - 5, other.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.weight.grad - 2, alone_head.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(head.bias.grad, alone_head.bias.grad, rtol=1e-4, atol=1e-6)
    assert held is prompt.grad or not torch.equal(held, prompt.grad)
    return [x.grad.double().sum().item(), prompt.grad.double().sum().item()]


class Remembering(models.Chain):
    """Counts its calls, and makes what it needs at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.sizes: list[int] = []
        self.table: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = self.count
        self.count += 1
        self.sizes.append(len(x))
        if self.count not in self.table:
            self.table[self.count] = torch.full((WIDTH,), float(self.count), device=x.device)
        row = self.table[self.count]
        return super().forward(x) + row


@check
def attributes_and_caches_of_the_model() -> list[Any]:
    net = seeded(Remembering)
    model = model_of(net)
    step = step_of(squares)
    step(model, vectors()[0]["x"])
    assert net.first == 0 and net.count == MICROBATCHES and list(net.table) == [1, 2, 3, 4]
    assert net.sizes == [2] * MICROBATCHES
    return [net.count, *net.table]


@check
def modules_outside_of_the_model_that_write_buffers() -> list[float]:
    norm, net = nn.BatchNorm1d(WIDTH, affine=False).to(device()), seeded(models.Chain)
    model = model_of(net)

    step = step_of(lambda model, batch: F.mse_loss(model(batch["x"]), norm(batch["y"])))
    batch = vectors(rows=32)[0]
    step(model, batch)
    assert int(norm.num_batches_tracked) == MICROBATCHES
    expected = nn.BatchNorm1d(WIDTH, affine=False).to(device())
    for part in batch["y"].chunk(MICROBATCHES):
        expected(part)
    torch.testing.assert_close(sorted(norm.running_mean.tolist()), sorted(expected.running_mean.tolist()))
    return norm.running_var.tolist()  # type: ignore[no-any-return]


@check
def modules_outside_of_the_model_whose_parameters_the_step_averages() -> list[float]:
    """As a teacher is that follows the model."""
    net, teacher = seeded(models.Chain), nn.Linear(WIDTH, WIDTH).to(device())
    nn.init.ones_(teacher.weight)
    model = model_of(net)

    @weft.step
    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            teacher.weight.mul_(0.5)
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        model.backward(loss)
        return loss

    step(model, vectors()[0])
    assert torch.equal(teacher.weight, torch.full_like(teacher.weight, 0.5**MICROBATCHES))
    return teacher.weight[0].tolist()  # type: ignore[no-any-return]
