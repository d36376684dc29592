"""Where losses come from, and who knows them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import step_of

from ..compare import Record, device, gradients
from .harness import WIDTH, assert_same, check, placed, same_as_alone, seeded, start, trained_alone, vectors
from .structure import numbered


@check
def loss_from_several_partitions() -> None:
    class Net(models.Chain):
        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = []
            for block in self.blocks:
                x = block(x)
                hidden.append(x)
            return {"out": x, "hidden": tuple(hidden), "none": None}

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        extra = sum(h.square().mean() for h in out["hidden"])
        return F.mse_loss(out["out"], batch["y"]) + 0.1 * extra

    same_as_alone(seeded(Net), vectors(), loss_of, places=numbered("blocks", [0, 1, 0, 1]))
    same_as_alone(seeded(Net), vectors(), loss_of, places=numbered("blocks", [0, 0, 1, 1]), pipeline="gpipe")


@check
def losses_of_arguments_that_pytorch_loses() -> None:
    weight = torch.linspace(0.5, 2, WIDTH, device=device())

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        weights = weight.expand_as(out)
        every = F.l1_loss(out, batch["y"], weight=weights, reduction="none").square().mean()
        return F.l1_loss(out, batch["y"], weight=weights) + every

    same_as_alone(
        seeded(models.Chain), vectors(), loss_of, places=numbered("blocks", [0, 0, 1, 1]), verify="off"
    )


@check
def backward_from_several_tensors() -> None:
    net = seeded(models.ThreeWays)
    weight = torch.linspace(0, 1, WIDTH, device=device())

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y, side = model(batch["x"])
        return y.square().mean() + (side * weight).sum() / len(side)

    batches = vectors(steps=1)
    expected = trained_alone(net, batches, loss_of)
    model = placed(net, {"fork": 0, "join": 1, "again": 1, "last": 0})

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        y, side = model(x)
        model.backward([y.square().mean(), side], [None, weight.expand_as(side) / len(side)])
        return y.square().mean()

    step(model, batches[0]["x"])
    actual = Record(expected.losses, [gradients(model.local_named_parameters())])
    assert_same(actual, expected)


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"], reduction="sum")


@check
def gradients_summed_over_microbatches() -> None:
    net = seeded(models.Chain)
    batch = vectors(steps=1)[0]
    whole = trained_alone(net, [batch], summed, microbatches=1)
    start()
    model = weft.DistributedModel(net, average_grads_across_microbatches=False)
    total = step_of(summed)(model, batch).reduce_sum().item()
    assert_same(Record([total], [gradients(model.local_named_parameters())]), whole)


@check
def loss_and_outputs_on_every_rank() -> list[float]:
    net = seeded(models.Chain)
    alone = copy.deepcopy(net)
    model = placed(net, numbered("blocks", [1, 0, 1, 0]))
    batch = vectors()[0]

    @weft.step
    def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(batch["x"])
        loss = F.mse_loss(out, batch["y"])
        model.backward(loss)
        return loss, out

    loss, out = step(model, batch)
    expected = alone(batch["x"]).detach()
    torch.testing.assert_close(out.concat(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.reduce_mean(), F.mse_loss(expected, batch["y"]), rtol=1e-5, atol=1e-6)
    assert type(loss.reduce_mean()) is Tensor and type(out.concat()) is Tensor
    return [*(value.item() for value in loss.outputs), out.concat().sum().item()]
