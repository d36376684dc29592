"""Trains a model on replicas twice: by PyTorch's DDP and by weft, on the same data, in the same processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft.torch as weft
from tests.parity.compare import TOLERANCE, Comparison, copies, device, largest_of
from tests.training import step_of

STEPS = 8
TINY = 0.001
"""MiB: a bucket for nearly every parameter."""

Net = Callable[[], nn.Module]


def inputs(net: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """This rank's own data."""
    numbers = torch.Generator().manual_seed(100 + weft.dp_rank())
    return [net.batch(numbers).to(device()) for _ in range(steps)]


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    """The model's output need not look like its input: its mean square is what is made small."""
    return model(x, step).float().pow(2).mean()


def with_ddp(
    net: nn.Module, steps: int = STEPS, accumulate: int = 1, **options: Any
) -> tuple[list[float], nn.Module]:
    model = DistributedDataParallel(net.to(device()), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step, x in enumerate(inputs(net, steps)):
        with nullcontext() if (step + 1) % accumulate == 0 else model.no_sync():
            loss = loss_of(model, x, step)
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, net


def with_weft(
    net: nn.Module, steps: int = STEPS, microbatches: int = 1, accumulate: int = 1, no_sync: bool = False,
    set_to_none: bool = True, settings: dict[str, Any] | None = None, **options: Any,
) -> tuple[list[float], nn.Module]:  # fmt: skip
    weft.init({"microbatches": microbatches, **(settings or {})})
    if accumulate > 1 and not no_sync:
        options["backward_passes_per_step"] = accumulate
    model = weft.DistributedModel(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train_step = step_of(loss_of, non_split_inputs=["step"])
    losses = []
    for step, x in enumerate(inputs(net, steps)):
        last = (step + 1) % accumulate == 0
        with model.no_sync() if no_sync and not last else nullcontext():
            losses.append(train_step(model, x, step).reduce_mean().item())
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return losses, net


def same(
    found: tuple[list[float], nn.Module],
    expected: tuple[list[float], nn.Module],
    what: str,
    tolerance: float = TOLERANCE,
) -> None:
    """Losses of every step, parameters and buffers at the end."""
    comparison = Comparison(tolerance)
    for step, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        comparison.number(f"{what}: loss", f"step {step}", mine, theirs)
    parameters = copies(expected[1].named_parameters())
    mine, buffers = copies(found[1].named_parameters()), copies(found[1].named_buffers())
    comparison.tensors(f"{what}: parameters", mine, parameters, largest_of(parameters))
    if weft.rank() == 0:  # DDP sends them before the next step, weft after this one
        comparison.tensors(f"{what}: buffers", buffers, copies(expected[1].named_buffers()))
    assert comparison.ok, comparison.report()
    for name, value in (mine | buffers).items():
        other = value.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, value), f"{what}: {name} differs between replicas"


def compare(
    make: Net,
    ddp: dict[str, Any] | None = None,
    variants: list[dict[str, Any]] | None = None,
    tolerance: float = TOLERANCE,
    **both: Any,
) -> None:
    torch.manual_seed(7 + weft.dp_rank())  # replicas start apart: rank 0's parameters count
    net = make()
    expected = with_ddp(copy.deepcopy(net), **both, **(ddp or {}))
    for variant in variants or [{}]:
        found = with_weft(copy.deepcopy(net), **{"bucket_cap_mb": TINY, **both, **variant})
        same(found, expected, f"{type(net).__name__} {variant}", tolerance)
