"""Ranks that are not alike: other initial weights, other data. What the first rank has counts, or it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.training import step_of
from weft.errors import DivergenceError

from ..compare import Record, device, gradients
from ..split import train_split
from .changes import descend
from .harness import (
    MICROBATCHES,
    ROWS,
    WIDTH,
    assert_same,
    check,
    placed,
    seeded,
    sgd,
    start,
    trained_alone,
    vectors,
)
from .structure import numbered


def apart(build: Callable[[], nn.Module], **settings: Any) -> None:
    """Each rank builds the network with a seed of its own; all train that of the first."""
    torch.manual_seed(70)
    expected = trained_alone(build().train(), vectors())
    for places in (numbered("blocks", [0, 1, 0, 1]), numbered("blocks", [1, 1, 0, 0]), None):
        torch.manual_seed(70 + weft.rank())
        net = build().train()
        start(**({} if places is None else {"auto_partition": False}), **settings)
        assert_same(train_split(net, vectors(), loss_of, sgd, places=places), expected)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


@check
def initial_weights_are_the_first_ranks() -> None:
    apart(models.Chain)


@check
def initial_buffers_are_the_first_ranks() -> None:
    class Net(models.Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(WIDTH))
            self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
            self.blocks[1].register_buffer("mean", torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.shift) * self.hidden

    apart(Net)


@check
def initial_plain_tensors_are_the_first_ranks() -> None:
    class Net(models.Chain):
        def __init__(self) -> None:
            super().__init__()
            self.features = torch.randn(WIDTH, WIDTH) / 4
            self.blocks[2].mask = torch.randn(WIDTH) > 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.features) * self.blocks[2].mask

    apart(Net)


@check
def initial_copies_stay_copies() -> None:
    """A frozen copy of the first block, as momentum encoders have it, is that of the first rank's block."""

    class Net(models.Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[3].load_state_dict(self.blocks[0].state_dict())
            self.blocks[3].requires_grad_(False)

    apart(Net)


@check
def weights_that_only_the_first_rank_has_loaded() -> None:
    loaded = seeded(models.Chain)

    def build() -> nn.Module:
        net = models.Chain()
        if weft.rank() == 0:
            net.load_state_dict(loaded.state_dict())
        return net

    expected = trained_alone(copy.deepcopy(loaded), vectors())
    torch.manual_seed(weft.rank())
    net = build().train()
    start()
    assert_same(train_split(net, vectors(), loss_of, sgd), expected)


@check
def initial_weights_in_half_precision() -> None:
    def build() -> nn.Module:
        net = models.Chain()
        net.blocks[0].up.to(torch.bfloat16).to(torch.float32)
        net.blocks[1].register_buffer("odd", torch.randn(3).to(torch.bfloat16))
        net.blocks[2].register_buffer("number", torch.randint(9, ()))
        return net

    apart(build)


# --- other data ---------------------------------------------------------------------------------------------


def mixed(body: Callable[..., Tensor], make: Callable[[torch.Generator], dict[str, Any]], **how: Any) -> None:
    """Every rank has batches of its own; the step trains on those of the first one."""
    for places in (numbered("blocks", [0, 0, 1, 1]), numbered("blocks", [1, 0, 0, 1])):
        net = seeded(models.Chain)
        other = copy.deepcopy(net)
        model = placed(net, places, inputs="any")
        step = step_of(body, **how)
        record, expected = Record(), Record()
        mine, first = (torch.Generator().manual_seed(seed) for seed in (20 + weft.rank(), 20))
        for _ in range(2):
            record.losses.append(step(model, **make(mine)).reduce_mean().item())
            record.gradients.append(gradients(model.local_named_parameters()))
            descend(model.local_parameters())
            batch, total = make(first), 0.0
            whole = how.get("non_split_inputs", ())
            for number in range(MICROBATCHES):
                part = {
                    name: value
                    if name in whole or not isinstance(value, Tensor)
                    else value.chunk(MICROBATCHES)[number]
                    for name, value in batch.items()
                }
                loss = body(other, **part) / MICROBATCHES
                loss.backward()
                total += loss.item()
            expected.losses.append(total)
            expected.gradients.append(gradients(other.named_parameters()))
            descend(other.parameters())
        assert_same(record, expected)


def pair(numbers: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(ROWS, WIDTH, generator=numbers).to(device()) for name in "xy"}


@check
def labels_are_the_first_ranks() -> None:
    mixed(lambda model, x, y: F.mse_loss(model(x), y), pair)


@check
def labels_that_are_indices_are_the_first_ranks() -> None:
    def make(numbers: torch.Generator) -> dict[str, Tensor]:
        y = torch.randint(WIDTH, (ROWS,), generator=numbers)
        return {"x": torch.randn(ROWS, WIDTH, generator=numbers), "y": y}

    mixed(lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1), make)


@check
def values_read_from_labels_are_the_first_ranks() -> None:
    def body(model: Any, x: Tensor, y: Tensor) -> Tensor:
        scale = y.sum().item()
        if y[0, 0] > 0:
            scale = scale + 1
        return (model(x) * scale).square().mean()

    mixed(body, pair)


@check
def masks_and_weights_of_losses_are_the_first_ranks() -> None:
    def make(numbers: torch.Generator) -> dict[str, Tensor]:
        return {**pair(numbers), "weight": torch.rand(WIDTH, generator=numbers)}

    def body(model: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        mask = (y > 0).float()
        return ((model(x * mask) - y).square() * mask * weight).sum() / mask.sum()

    mixed(body, make, non_split_inputs=["weight"])


@check
def teachers_of_the_step_see_the_first_ranks_inputs() -> None:
    teacher = seeded(models.Block).requires_grad_(False)
    mixed(lambda model, x, y: F.mse_loss(model(x), teacher(y + x)), pair)


@check
def inputs_only_on_the_first_rank() -> None:
    def make(numbers: torch.Generator) -> dict[str, Tensor]:
        full = pair(numbers)
        mine = weft.rank() == 0 or numbers.initial_seed() == 20
        return full if mine else {name: value[:, :0] for name, value in full.items()}

    mixed(lambda model, x, y: F.mse_loss(model(x), y), make)


@check
def numbers_that_differ_between_ranks_are_refused() -> list[str]:
    told = []
    for values in (lambda: 1.0 + weft.rank(), lambda: [1, weft.rank()], lambda: {"a": bool(weft.rank())}):
        start(inputs="any")
        model = weft.DistributedModel(seeded(models.Chain))

        @weft.step
        def step(model: Any, x: Tensor, much: Any) -> None:
            model.backward(model(x).mean())

        try:
            step(model, torch.randn(ROWS, WIDTH) + weft.rank(), values())
        except DivergenceError as error:
            assert "much" in str(error), error
            told.append(str(error))
        else:
            raise AssertionError("no error")
    return told


@check
def batches_that_begin_to_differ_are_refused() -> None:
    for settings in ({}, {"inputs": "any"}):
        start(**settings)
        model = weft.DistributedModel(seeded(models.Chain))

        @weft.step
        def step(model: Any, x: Tensor) -> None:
            model.backward(model(x).mean())

        step(model, torch.ones(ROWS, WIDTH))
        try:
            step(model, torch.ones(ROWS, WIDTH) + weft.rank())
        except Exception as error:
            assert "values in x" in str(error), error
        else:
            raise AssertionError("no error")
        weft.barrier()
        break
