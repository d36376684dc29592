"""Replicas of a model that is changed after it was wrapped: new parts take part in the averages, or it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft.torch as weft
from tests.models import Adapter
from tests.parity.checks.changes import descend
from tests.parity.compare import device
from tests.parity.registry import Checks
from tests.training import step_of
from weft.errors import DivergenceError

CHECKS = Checks()
Change = Callable[[nn.Sequential], None]
ROWS, WIDTH = 6, 4


def build() -> nn.Sequential:
    torch.manual_seed(5)
    middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), middle, nn.Linear(8, 1))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(steps: int) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS * weft.dp_size(), WIDTH, generator=numbers) for _ in range(steps)]


def trained(change: Change, when: int, steps: int = 3, inside: bool = True, **options: Any) -> nn.Sequential:
    """``change`` comes before step ``when``; new parts start apart: those of the first replica count."""
    weft.init({"microbatches": 1})
    net = build().eval()
    model = weft.DistributedModel(net, **options)
    train_step = step_of(loss_of)
    for number, x in enumerate(batches(steps)):
        if number == when:
            torch.manual_seed(40 + weft.rank())
            change(net)
        mine = x.chunk(weft.dp_size())[weft.dp_rank()].to(device())
        if inside:
            train_step(model, mine)
        else:
            loss_of(model, mine).backward()
        descend(net.parameters())
    return net


def alone(change: Change, when: int, steps: int = 3) -> nn.Sequential:
    net = build().eval()
    for number, x in enumerate(batches(steps)):
        if number == when:
            torch.manual_seed(40)
            change(net)
        loss_of(net, x).backward()
        descend(net.parameters())
    return net


def compare(change: Change, **options: Any) -> None:
    for when, inside in ((0, True), (1, True), (2, True), (1, False)):
        found, expected = trained(change, when, inside=inside, **options), alone(change, when)
        mine, theirs = found.state_dict(), expected.state_dict()
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            torch.testing.assert_close(value.cpu(), theirs[name], rtol=1e-5, atol=1e-6)
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), f"{name} differs between replicas"


@CHECKS.check
def replaced_layer() -> None:
    def change(net: nn.Sequential) -> None:
        net[3] = nn.Linear(8, 3)

    for options in ({}, {"overlapping_allreduce": False}, {"gradient_as_bucket_view": True}):
        compare(change, **options)


@CHECKS.check
def added_layers() -> None:
    def change(net: nn.Sequential) -> None:
        net.append(nn.Tanh())
        net.append(nn.Sequential(nn.Linear(1, 5), nn.BatchNorm1d(5).eval()))

    compare(change)


@CHECKS.check
def deleted_layer() -> None:
    def change(net: nn.Sequential) -> None:
        del net[2]

    compare(change)


@CHECKS.check
def tied_layers() -> None:
    def change(net: Any) -> None:
        net[2][0].weight = nn.Parameter(torch.randn(8, 8) / 3)
        net[2].insert(1, nn.Linear(8, 8))
        net[2][1].weight = net[2][0].weight

    compare(change)


@CHECKS.check
def adapted_layers() -> None:
    def change(net: Any) -> None:
        net.requires_grad_(False)
        net[0], net[2][0] = Adapter(net[0]), Adapter(net[2][0])

    compare(change)


@CHECKS.check
def frozen_and_thawed() -> None:
    def freeze(net: Any) -> None:
        net[2].requires_grad_(False)

    compare(freeze)


@CHECKS.check
def replaced_parameter() -> None:
    def change(net: Any) -> None:
        net[3].weight = nn.Parameter(torch.randn(1, 8))

    compare(change)


@CHECKS.check
def replaced_forward() -> None:
    def change(net: Any) -> None:
        layer = copy.copy(net[3])
        net[3].forward = lambda x: torch.tanh(nn.functional.linear(x, layer.weight))

    compare(change)


@CHECKS.check
def changed_on_one_replica_alone() -> None:
    def replace(net: Any) -> None:
        net[3] = nn.Linear(8, 1)

    def freeze(net: Any) -> None:
        net[3].requires_grad_(False)

    def other(net: Any) -> None:
        net[3] = nn.Linear(8, 1 + weft.rank())

    for when in (0, 1):
        for change, words, everywhere in (
            (replace, "replicas have changed modules or parameters", False),
            (freeze, "", False),
            (other, "the ranks differ", True),
        ):
            try:
                trained(change if weft.rank() == 0 or everywhere else lambda net: None, when)
            except DivergenceError as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{change.__name__}: no error")


@CHECKS.check
def batch_norm_in_checkpoints_counts_once() -> None:
    weft.init({"microbatches": 2})
    net = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)).to(device())
    model = weft.DistributedModel(net)

    @weft.step
    def train_step(model: Any, x: Tensor, reentrant: bool) -> None:
        model.backward(checkpoint(model, x, use_reentrant=reentrant).square().mean())

    x = torch.randn(ROWS, WIDTH, device=device(), requires_grad=True)
    for reentrant in (False, True, False):
        train_step(model, x, reentrant)
    assert int(net[1].num_batches_tracked) == 6
