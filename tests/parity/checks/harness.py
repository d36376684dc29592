"""Registers checks, and trains a network split and alone to compare the two.

A check is a function without arguments that runs on both ranks of a job and asserts. What it returns, if
anything, is JSON that must be the same on all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft

from ..compare import (
    TOLERANCE,
    Comparison,
    LossOf,
    Record,
    device,
    first_names,
    on_device,
    train_alone,
)
from ..registry import Checks
from ..split import OptimizerOf, train_split

RANKS = 2
ROWS = 8
WIDTH = 16
MICROBATCHES = 4

CHECKS = Checks()
check = CHECKS.check
Places = Mapping[str, int]


def start(microbatches: int | str = MICROBATCHES, **settings: Any) -> None:
    """New settings for the models that come."""
    weft.init({"partitions": RANKS, "microbatches": microbatches, **settings})


def placed(net: nn.Module, places: Places, **settings: Any) -> weft.DistributedModel:
    """A distributed model whose parts lie where `places` says."""
    start(**{"auto_partition": False, "default_partition": 0, **settings})
    model = weft.DistributedModel(net)
    for name, partition in places.items():
        weft.set_partition(net.get_submodule(name), partition)
    return model


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most checks."""
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that does not blow up rounding noise."""
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def vectors(*shape: int, steps: int = 3, rows: int = ROWS) -> list[dict[str, Tensor]]:
    """For each step `x` and `y` [rows, *shape] (default: [rows, WIDTH]), where models train."""
    numbers = torch.Generator().manual_seed(11)
    size = (rows, *(shape or (WIDTH,)))
    made = [{name: torch.randn(size, generator=numbers) for name in "xy"} for _ in range(steps)]
    return list(map(on_device, made))


def squared_error(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The usual loss: distance of `model(x)` from `y`, taken in the step's body."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def own_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """For models whose forward gives the loss."""
    return model(**batch)


def seeded(build: Callable[..., nn.Module], *arguments: Any, **keywords: Any) -> nn.Module:
    """A network with the same weights on all ranks, in training mode, where models train."""
    torch.manual_seed(3)
    return build(*arguments, **keywords).train().to(device())


def trained_alone(
    net: nn.Module,
    batches: Sequence[Any],
    loss_of: LossOf = squared_error,
    *,
    microbatches: int = MICROBATCHES,
    optimizer_of: OptimizerOf = sgd,
    copied: bool = True,
) -> Record:
    """The reference, on a copy of the network."""
    alone = copy.deepcopy(net) if copied else net
    return train_alone(alone, batches, loss_of, optimizer_of(alone.parameters()), microbatches)


def same_as_alone(
    net: nn.Module,
    batches: Sequence[Any],
    loss_of: LossOf = squared_error,
    *,
    places: Places | None = None,
    microbatches: int = MICROBATCHES,
    optimizer_of: OptimizerOf = sgd,
    tolerance: float = TOLERANCE,
    alone: nn.Module | None = None,
    **settings: Any,
) -> Record:
    """Trains split, by `places` (module name -> partition) or automatically, and compares with one process.

    `alone` is the network of that process, where a copy of `net` will not do.
    """
    how = {"microbatches": microbatches, "optimizer_of": optimizer_of, "copied": alone is None}
    expected = trained_alone(alone or net, batches, loss_of, **how)
    if places is not None:
        settings = {"auto_partition": False, "default_partition": 0, **settings}
    start(microbatches, **settings)
    actual = train_split(net, batches, loss_of, optimizer_of, places=places)
    assert_same(actual, expected, tolerance)
    if places is not None:
        assert_placed(net, actual.parameters, places)
    return actual


def assert_same(actual: Record, expected: Record, tolerance: float = TOLERANCE) -> None:
    """All that this rank has is what one process has."""
    comparison = Comparison(tolerance)
    comparison.record(actual, expected)
    assert comparison.ok, comparison.report()


def assert_placed(net: nn.Module, owned: Iterable[str], places: Places) -> None:
    """This rank owns the parameters below the modules placed on it, and none below others."""
    mine = set(owned)
    for name in set(first_names(net).values()):
        above = [module for module in places if name.startswith(module + ".")]
        if above:
            owner = places[max(above, key=len)]
            assert (name in mine) == (owner == weft.pp_rank()), (
                f"{name}: placed on {owner}, rank {weft.pp_rank()}"
            )
