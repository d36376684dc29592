"""Where parts go when the user says so."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests import models

from .harness import (
    check,
    own_loss,
    same_as_alone,
    seeded,
    squared_error,
    start,
    trained_alone,
    vectors,
)
from .inputs import refused
from .structure import tokens


@weft.step
def step(model: nn.Module, batch: Any) -> Tensor:
    """One step of training; a batch of tokens goes to the model as it is."""
    loss = own_loss(model, batch) if "ids" in batch else squared_error(model, batch)
    model.backward(loss)
    return loss


class Contexts(nn.Module):
    """Parts created inside and outside of `weft.partition`."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = models.Block()
        with weft.partition(0):
            self.zero = models.Block()
            with weft.partition(1):
                self.inner_one = models.Block()
            self.zero_again = models.Block()
        with weft.partition(1):
            self.one = nn.ModuleList([models.Block(), models.Block()])
            with weft.partition(0):
                self.inner_zero = models.Block()

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.outside, self.zero, self.inner_one, self.zero_again, *self.one, self.inner_zero):
            x = part(x)
        return x


INNERMOST = {"zero": 0, "inner_one": 1, "zero_again": 0, "one": 1, "inner_zero": 0}


def modules_of(model: nn.Module) -> set[str]:
    """The first names of the modules whose parameters this rank has."""
    names = (name.removeprefix("module.") for name, _ in model.local_named_parameters())
    return {name.split(".")[0] for name in names}


def owners(places: dict[str, int]) -> set[str]:
    """The modules among `places` that belong to this rank."""
    return {name for name, partition in places.items() if partition == weft.pp_rank()}


@check
def partition_contexts() -> None:
    for default in (0, 1):
        start(auto_partition=False, default_partition=default)
        model = weft.DistributedModel(seeded(Contexts))
        assert not model.partitioned
        expected = trained_alone(seeded(Contexts), vectors(steps=1)).losses[0]
        loss = step(model, vectors(steps=1)[0]).reduce_mean().item()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        assert model.partitioned
        wanted = owners({**INNERMOST, "outside": default})
        assert modules_of(model) == wanted, f"default {default}: {modules_of(model)}, not {wanted}"


@check
def set_partition_wins_over_contexts() -> None:
    start(auto_partition=False, default_partition=1)
    model = weft.DistributedModel(seeded(Contexts))
    module = model.get_module()
    weft.set_partition(module.zero, 1)
    weft.set_partition(module.one, 0)
    step(model, vectors()[0])
    wanted = owners({**INNERMOST, "outside": 1, "zero": 1, "one": 0})
    assert modules_of(model) == wanted, f"{modules_of(model)}, not {wanted}"


@check
def innermost_set_partition_wins() -> None:
    net = seeded(models.Chain)
    places = {"blocks": 1, "blocks.1": 0, "blocks.3.up": 0}
    same_as_alone(net, vectors(), places=places)


@check
def automatic_partition_ignores_contexts() -> None:
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with weft.partition(0):
                self.a, self.b, self.c, self.d = (models.Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.d(self.c(self.b(self.a(x))))

    start()
    model = weft.DistributedModel(seeded(Left))
    step(model, vectors()[0])
    assert modules_of(model) and modules_of(model) != {"a", "b", "c", "d"}, modules_of(model)


@check
def everything_on_one_partition() -> None:
    for partition in (0, 1):
        same_as_alone(seeded(models.Chain), vectors(), places={"blocks": partition})


@check
def report_names_parts_and_partitions() -> str:
    start(auto_partition=False, default_partition=0)
    net = seeded(models.Chain)
    model = weft.DistributedModel(net)
    for number in range(4):
        weft.set_partition(net.blocks[number], number // 2)
    step(model, vectors()[0])
    report = str(weft.partition_report())
    for number in range(4):
        assert f"blocks.{number}" in report, report
    return report


@check
def tied_parts_placed_apart_are_refused() -> None:
    start(auto_partition=False, default_partition=0)
    net = seeded(models.Tied)
    model = weft.DistributedModel(net)
    weft.set_partition(net.embed, 0)
    weft.set_partition(net.head, 1)
    batch = tokens()[0]
    refused(step, model, batch, words=["embed", "head", "weight"])
    del model, net
    gc.collect()
    same_as_alone(seeded(models.Tied), tokens(), own_loss, places={"embed": 1, "head": 1})


@check
def partition_that_does_not_exist_is_refused() -> None:
    start(auto_partition=False, default_partition=0)
    net = seeded(models.Chain)
    model = weft.DistributedModel(net)
    weft.set_partition(net.blocks[1], 2)
    refused(step, model, vectors()[0], words=["2", "partition", "blocks.1"])
    del model, net
    gc.collect()
    same_as_alone(seeded(models.Chain), vectors())
