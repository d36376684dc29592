"""BatchNorm inside of activation checkpoints: a batch counts once, as in one process without checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.torch.activation_checkpointing import set_activation_checkpointing

from ..split import train_split
from .harness import WIDTH, assert_same, check, seeded, sgd, squared_error, start, trained_alone, vectors

HOW: dict[str, Any] = {"way": None}


class Normal(nn.Sequential):
    """Linear, BatchNorm, Tanh; `momentum` None: a cumulative average."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, momentum=momentum), nn.Tanh()
        )


class Saving(Normal):
    """Checkpoints itself, as `HOW` says."""

    def forward(self, x: Tensor) -> Tensor:
        if HOW["way"] is None or not HOW["inside"]:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=HOW["way"] == "reentrant")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Saving(), Saving(None), Saving(), Saving(0.5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones(1, requires_grad=True, device=x.device)  # reentrant checkpoints need that
        for block in self.blocks:
            around = HOW["way"] is not None and not HOW["inside"]
            x = checkpoint(block, x, use_reentrant=HOW["way"] == "reentrant") if around else block(x)
        return x


def same(
    places: dict[str, int], way: str | None, inside: bool = True, mark: bool = False, **settings: Any
) -> None:
    HOW.update(way=None, inside=True)
    net = seeded(Net)
    expected = trained_alone(net, vectors(rows=32), squared_error)
    HOW.update(way=way, inside=inside)
    try:
        start(auto_partition=False, **settings)
        if mark:
            for block in net.blocks:
                set_activation_checkpointing(block)
        actual = train_split(net, vectors(rows=32), squared_error, sgd, places=places)
    finally:
        HOW.update(way=None)
    assert_same(actual, expected)
    counts = [value for name, value in actual.state.items() if name.endswith("num_batches_tracked")]
    assert [int(count) for count in counts if count is not None] == [12] * 4, counts


HALVES = {f"blocks.{number}": number // 2 for number in range(4)}
TURNS = {f"blocks.{number}": number % 2 for number in range(4)}
INSIDE = {f"blocks.{number}.{part}": part for number in range(4) for part in (0, 1)}


@check
def batch_norm_in_a_checkpoint_inside_of_a_unit() -> None:
    for places in (HALVES, TURNS):
        same(places, "plain")


@check
def batch_norm_in_a_reentrant_checkpoint_inside_of_a_unit() -> None:
    for places in (HALVES, TURNS):
        same(places, "reentrant")


@check
def batch_norm_in_a_checkpoint_around_units() -> None:
    for places in (HALVES, INSIDE):
        same(places, "plain", inside=False)


@check
def batch_norm_in_a_reentrant_checkpoint_around_units() -> None:
    for places in (HALVES, INSIDE):
        same(places, "reentrant", inside=False)


@check
def batch_norm_that_is_a_checkpointed_unit() -> None:
    same(INSIDE, "plain")


@check
def batch_norm_with_activation_checkpointing_by_weft() -> None:
    for pipeline in ("1f1b", "gpipe"):
        same(HALVES, None, mark=True, pipeline=pipeline)
