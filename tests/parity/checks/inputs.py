"""What goes into a step and what comes out of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import mean_squared_error, step_of
from weft.errors import UsageError

from ..compare import Record, device, gradients
from .harness import MICROBATCHES, ROWS, WIDTH, assert_same, check, seeded, start, vectors

HALF = ROWS // MICROBATCHES


def chain(**settings: Any) -> tuple[nn.Module, nn.Module]:
    """A split chain of blocks, and the same network whole."""
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    start(**settings)
    return weft.DistributedModel(net), alone


def refused(step: Callable[..., Any], *arguments: Any, words: list[str]) -> str:
    """Calls a step that must fail with all of `words` in the message, which is returned."""
    try:
        step(*arguments)
    except Exception as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in {type(error).__name__}: {error}"
        return str(error)
    raise AssertionError(f"no error; one with {words} should have come")


class Point(NamedTuple):
    """A record with tensors to cut."""

    x: Tensor
    scale: float


class Graphs:
    """Not a tensor; knows how to cut itself."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Graphs:
        return Graphs(self.rows.chunk(num_mb, axis)[mb])


class Backward:
    """A step that is an object."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, scale: float, x: Tensor) -> Tensor:
        loss = (self.model(x) * scale).square().mean()
        self.model.backward(loss)
        return loss


@check
def steps_that_are_no_functions() -> None:
    """An object that is called, a partial of it, and the model."""
    model, alone = chain()
    x = vectors()[0]["x"]
    loss = weft.step(functools.partial(Backward(model), 2.0))(x)
    torch.testing.assert_close(loss.reduce_mean(), (alone(x) * 2.0).square().mean())
    again = weft.step(Backward(model))(2.0, x)
    torch.testing.assert_close(again.reduce_mean(), loss.reduce_mean())
    with torch.no_grad():
        torch.testing.assert_close(weft.step(model)(x).concat(), alone(x))


@check
def nested_inputs_are_cut_everywhere() -> None:
    model, alone = chain()
    batch = vectors()[0]

    @weft.step
    def step(model: nn.Module, inputs: Any, *more: Tensor, factor: float, **named: Any) -> Tensor:
        point, (listed, nothing), text = inputs["point"], inputs["list"], inputs["text"]
        (member,) = inputs["set"]
        for tensor in (point.x, listed["deep"][0], member, *more, named["extra"][0]):
            assert tensor.shape == (HALF, WIDTH), tensor.shape
        assert point.scale == 2.0 and nothing is None and text == "whole" and factor == 3.0
        assert type(point) is Point and type(inputs["list"]) is tuple and len(more) == 2
        out = model(point.x + listed["deep"][0] + member) * factor
        loss = F.mse_loss(out, more[0] + more[1] + named["extra"][0])
        model.backward(loss)
        return loss

    x, y = batch["x"], batch["y"]
    inputs = {"point": Point(x, 2.0), "list": ({"deep": [x]}, None), "text": "whole", "set": {y}}
    loss = step(model, inputs, y, x, factor=3.0, extra=[y]).reduce_mean()
    expected = F.mse_loss(alone(2 * x + y) * 3.0, x + 2 * y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0.0)
    mine = Record(gradients=[gradients(model.local_named_parameters())])
    assert_same(mine, Record(gradients=[gradients(alone.named_parameters())]))


@check
def inputs_that_are_not_cut() -> None:
    model, alone = chain()
    batch = vectors()[0]
    weights, sizes = torch.rand(3, WIDTH, device=device()), torch.tensor(0.5, device=device())

    @weft.step(non_split_inputs=["weights", "sizes"])
    def step(model: nn.Module, x: Tensor, weights: Tensor, sizes: Any, y: Tensor) -> Tensor:
        assert x.shape == y.shape == (HALF, WIDTH) and weights.shape == (3, WIDTH)
        loss = F.mse_loss(model(x * weights.sum(0)) * sizes["one"][0], y)
        model.backward(loss)
        return loss

    for call in (
        lambda: step(model, batch["x"], weights, {"one": [sizes]}, batch["y"]),
        lambda: step(model, batch["x"], sizes={"one": [sizes]}, y=batch["y"], weights=weights),
    ):
        expected = F.mse_loss(alone(batch["x"] * weights.sum(0)) * sizes, batch["y"]).detach()
        torch.testing.assert_close(call().reduce_mean(), expected, rtol=1e-5, atol=0.0)


@check
def inputs_cut_along_another_dim() -> None:
    model, alone = chain()
    x = vectors(5, WIDTH)[0]["x"]

    @weft.step(input_split_axes={"rows_second": 1, "last": -1})
    def step(model: nn.Module, rows_first: Tensor, rows_second: Tensor, last: list[Tensor]) -> Tensor:
        assert rows_first.shape == (HALF, 5, WIDTH) and rows_second.shape == (5, HALF, WIDTH)
        assert last[0].shape == (3, HALF)
        out = model(rows_first + rows_second.transpose(0, 1))
        return out.mean((1, 2)) * last[0].sum(0)

    factors = torch.rand(3, ROWS, device=device())
    out = step(model, x, x.transpose(0, 1), [factors]).concat()
    torch.testing.assert_close(out, alone(2 * x).mean((1, 2)).detach() * factors.sum(0), rtol=1e-5, atol=1e-6)


@check
def objects_that_cut_themselves() -> None:
    model, alone = chain()
    batch = vectors()[0]

    @weft.step
    def step(model: nn.Module, graphs: Graphs, listed: list[Graphs], x: Tensor) -> Tensor:
        assert graphs.rows.shape == listed[0].rows.shape == x.shape == (HALF, WIDTH)
        return model(graphs.rows + listed[0].rows + x)

    out = step(model, Graphs(batch["x"]), [Graphs(batch["y"])], batch["x"]).concat()
    torch.testing.assert_close(out, alone(2 * batch["x"] + batch["y"]).detach(), rtol=1e-5, atol=1e-6)


class Result(dict):  # type: ignore[type-arg]
    """A dict with attributes, as model libraries return."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@check
def results_keep_their_structure() -> list[Any]:
    model, alone = chain()
    x = vectors()[0]["x"]

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        loss = out.square().mean()
        model.backward(loss)
        pair = Point(out.sum(1), 2.0)
        return Result(
            loss=loss, out=out, pair=pair, items=[out[:, 0], None], value=loss.item(), name="n", none=None
        )

    result = step(model, x)
    expected = alone(x).detach()
    losses = [part.square().mean().item() for part in expected.chunk(MICROBATCHES)]
    assert type(result) is Result and type(result["pair"]) is Point and type(result["items"]) is list
    assert isinstance(result.loss, weft.StepOutput) and isinstance(result["loss"], weft.StepOutput)
    assert len(result.loss.outputs) == MICROBATCHES and all(o.shape == () for o in result.loss.outputs)
    assert all(type(o) is Tensor and not o.requires_grad for o in result.loss.outputs)
    told = torch.tensor(losses, device=device())
    torch.testing.assert_close(torch.stack(result.loss.outputs), told, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(result.loss.reduce_mean(), told.mean(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(result.loss.reduce_sum(), told.sum(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(result.loss.stack(), told, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(result.out.concat(), expected, rtol=1e-5, atol=1e-6)
    assert result.out.stack().shape == (MICROBATCHES, HALF, WIDTH)
    torch.testing.assert_close(result["pair"].x.concat(), expected.sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result["items"][0].concat(), expected[:, 0], rtol=1e-5, atol=1e-6)
    assert type(result.value) is list and result.name == ["n"] * MICROBATCHES
    assert result["pair"].scale == [2.0] * MICROBATCHES
    torch.testing.assert_close(torch.tensor(result.value), torch.tensor(losses), rtol=1e-5, atol=0.0)
    return result.value


@check
def other_results_become_lists() -> list[Any]:
    model, _ = chain()

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Any:
        out = model(x)
        return str(out.argmax(1).tolist()), "text", int(out.shape[0]), bool(out.sum() > 0)

    chosen, text, rows, positive = step(model, vectors()[0]["x"])
    assert len(chosen) == MICROBATCHES
    assert text == ["text"] * MICROBATCHES and rows == [HALF] * MICROBATCHES
    assert all(type(value) is bool for value in positive)

    @weft.step
    def silent(model: nn.Module, x: Tensor) -> None:
        model(x)

    assert silent(model, vectors()[0]["x"]) in (None, [None] * MICROBATCHES)
    return [chosen, positive]


@check
def a_step_as_a_class_attribute() -> None:
    model, alone = chain()
    x = vectors()[0]["x"]

    class Trainer:
        @weft.step
        def forward_only(model: nn.Module, x: Tensor) -> Tensor:  # noqa: N805
            return model(x)

        def run(self) -> Tensor:
            return self.forward_only(model, x).concat()

    torch.testing.assert_close(Trainer().run(), alone(x).detach(), rtol=1e-5, atol=1e-6)


@check
def results_that_stay_in_the_graph() -> None:
    """With `detach_outputs=False` results need gradients, but no rank goes backward from outside of the step."""
    model, alone = chain()
    x = vectors()[0]["x"]

    @weft.step(detach_outputs=False)
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    for width in (1, 200):  # results that go alone, and with others
        rows = x.repeat(width, 1)
        out = step(model, rows).concat()
        torch.testing.assert_close(out.detach(), alone(rows).detach(), rtol=1e-5, atol=1e-6)
        assert out.requires_grad
        with pytest.raises(UsageError, match=r"compute the loss in the function that @weft\.step decorates"):
            out.square().mean().backward()
        assert all(parameter.grad is None for parameter in model.local_parameters())
        with torch.no_grad():
            assert not step(model, rows).concat().requires_grad


@weft.step
def plain(model: nn.Module, x: Any, y: Tensor | None = None) -> Tensor:
    """A step that only runs the model."""
    return model(x["deep"] if isinstance(x, dict) else x)


uneven = step_of(mean_squared_error, allow_uneven=True)
"""A step of training with microbatches of different sizes."""


@check
def uneven_batches_are_allowed_where_asked_for() -> None:
    model, alone = chain()
    for rows in (10, 7, 8, 4, 13):
        batch = vectors(rows=rows)[0]
        model.zero_grad()
        alone.zero_grad()
        expected = F.mse_loss(alone(batch["x"]), batch["y"])
        expected.backward()
        loss = uneven(model, batch["x"], batch["y"])
        sizes = [part.shape[0] for part in plain_sizes(model, batch["x"])]
        assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1, sizes
        torch.testing.assert_close(loss.reduce_mean(), expected.detach(), rtol=1e-5, atol=0.0)
        mine = Record(gradients=[gradients(model.local_named_parameters())])
        assert_same(mine, Record(gradients=[gradients(alone.named_parameters())]))


@weft.step(allow_uneven=True)
def plain_step(model: nn.Module, x: Tensor) -> Tensor:
    """Only runs the model, on microbatches of different sizes."""
    with torch.no_grad():
        return model(x)


def plain_sizes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs of the microbatches."""
    return plain_step(model, x).outputs


@check
def tensors_without_the_batch_dim_are_refused() -> list[str]:
    model, _ = chain()
    x, told = torch.zeros(ROWS, WIDTH), []
    for other in (torch.zeros(2 * ROWS), torch.zeros(WIDTH, ROWS), torch.zeros(1), torch.tensor(1.0)):
        told.append(refused(plain, model, x, other, words=["non_split_inputs"]))
        told.append(refused(plain, model, {"deep": x, "other": [other]}, words=["non_split_inputs"]))
    plain(model, x)
    return told
