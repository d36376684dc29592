"""Two ranks or more, one partition: weft's replicas train as PyTorch's DDP does; `test_data_parallel.py` starts it.

    python -m weft run -n 2 tests/parity/data_parallel.py [check...]

Each check trains the same model on the same data twice, in the same processes, over the same gloo.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import weft.torch as weft
from tests.parity import data_parallel_changes
from tests.parity.compare import TOLERANCE, Comparison, copies, device
from tests.parity.data_parallel_harness import TINY, compare, inputs, loss_of, with_ddp, with_weft
from tests.parity.data_parallel_models import (
    Convolutions,
    Embedding,
    Mixed,
    Plain,
    Shifted,
    Sometimes,
    Tied,
    Twice,
)  # fmt: skip
from tests.parity.registry import Checks
from tests.training import step_of
from weft.errors import DivergenceError, UsageError

CHECKS = Checks()
CHECKS.update(data_parallel_changes.CHECKS)


@CHECKS.check
def plain() -> None:
    compare(
        Plain,
        variants=[
            {},
            {"bucket_cap_mb": None},
            {"overlapping_allreduce": False},
            {"gradient_as_bucket_view": True},
            {"gradient_as_bucket_view": True, "set_to_none": False},
            {"microbatches": 2},
            {"microbatches": 4, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
        ],
    )


@CHECKS.check
def compressed() -> None:
    """Near the exact losses, and the same on all replicas."""
    torch.manual_seed(7)
    net = Plain()
    expected = with_ddp(copy.deepcopy(net))[0]
    for name in ("fp16", "int8"):
        losses, trained = with_weft(
            copy.deepcopy(net), settings={"compression": name}, bucket_cap_mb=TINY, microbatches=2
        )
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0.0)
        for parameter in trained.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter)


@CHECKS.check
def unused() -> None:
    compare(Sometimes, {"find_unused_parameters": True}, [{}, {"gradient_as_bucket_view": True}])


@CHECKS.check
def gradients_in_the_same_memory() -> None:
    compare(Shifted, variants=[{}, {"bucket_cap_mb": 25}, {"overlapping_allreduce": False}])


@CHECKS.check
def shared() -> None:
    compare(Tied)


@CHECKS.check
def used_twice() -> None:
    compare(Twice, variants=[{}, {"gradient_as_bucket_view": True}])


@CHECKS.check
def several_dtypes() -> None:
    """More than two values of bfloat16 make another sum in another order."""
    tolerance = TOLERANCE if weft.dp_size() == 2 else 1e-3
    compare(Mixed, variants=[{}, {"bucket_cap_mb": 25}], tolerance=tolerance)


@CHECKS.check
def sparse() -> None:
    compare(Embedding)


@CHECKS.check
def channels_last() -> None:
    def make() -> nn.Module:
        return Convolutions().to(memory_format=torch.channels_last)

    compare(make, variants=[{}, {"gradient_as_bucket_view": True}])


@CHECKS.check
def accumulation() -> None:
    compare(
        Plain,
        variants=[{}, {"no_sync": True}, {"gradient_as_bucket_view": True}, {"microbatches": 2}],
        accumulate=4,
    )


def uneven(divide_by_all: bool) -> None:
    """Rank 1 has two batches less, rank 2 one less, rank 3 one more."""
    steps = (6, 4, 5, 7)[weft.dp_rank()]
    torch.manual_seed(3)
    net, other = Convolutions(), Convolutions()
    other.load_state_dict(net.state_dict())
    weft.init({"microbatches": 1})
    ddp = DistributedDataParallel(net.to(device()))
    model = weft.DistributedModel(other, bucket_cap_mb=TINY)
    train_step = step_of(loss_of, non_split_inputs=["step"])
    for trained in (ddp, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
        with trained.join(divide_by_initial_world_size=divide_by_all):
            for step, x in enumerate(inputs(net, steps)):
                optimizer.zero_grad()
                if trained is model:
                    train_step(model, x, step)
                else:
                    loss_of(ddp, x, step).backward()
                optimizer.step()
    comparison = Comparison()
    comparison.tensors("join", copies(other.named_parameters()), copies(net.named_parameters()))
    assert comparison.ok, comparison.report()
    for name, value in copies(other.state_dict().items()).items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), f"{name} differs after join"


@CHECKS.check
def join() -> None:
    uneven(True)
    uneven(False)


@CHECKS.check
def hook() -> None:
    """PyTorch's own hooks on weft's buckets. More than two values of float16 make another sum in another order."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    close = {"rtol": 1e-5, "atol": 1e-7} if weft.dp_size() == 2 else {"rtol": 2e-3, "atol": 2e-5}
    torch.manual_seed(5)
    net = Plain()
    reference, other = copy.deepcopy(net), copy.deepcopy(net)
    ddp = DistributedDataParallel(reference.to(device()))
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    weft.init({"microbatches": 1})
    model = weft.DistributedModel(other, bucket_cap_mb=TINY)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train_step = step_of(loss_of, non_split_inputs=["step"])
    for step, x in enumerate(inputs(net, 3)):
        for trained in (ddp, model):
            trained.zero_grad()
        loss_of(ddp, x, step).backward()
        train_step(model, x, step)
        for mine, theirs in zip(other.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **close)
    try:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    except UsageError as error:
        assert "has a communication hook already" in str(error)
    else:
        raise AssertionError("two hooks were taken")


class Grows(nn.Module):
    """Its step uses the layer in one backward pass, and from the third step on in two, on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)


def grow(**options: Any) -> None:
    torch.manual_seed(9)
    net = Grows()
    weft.init({"microbatches": 1})
    model = weft.DistributedModel(net, bucket_cap_mb=TINY / 10, **options)
    replicas = weft.dp_size()
    batches = torch.randn(5, replicas, 4, 8, generator=torch.Generator().manual_seed(1)).to(device())

    def parts(step: int, replica: int, x: Tensor) -> list[Tensor]:
        whole = net.second(net.first(x)).pow(2).mean()
        return [whole, net.second(x).pow(2).mean()] if step in (2, 4) and replica == 1 else [whole]

    @weft.step(non_split_inputs=["step"])
    def train_step(model: Any, x: Tensor, step: int) -> None:
        for loss in parts(step, weft.dp_rank(), x):
            model.backward(loss)

    for step, batch in enumerate(batches):
        net.zero_grad()
        train_step(model, batch[weft.dp_rank()], step)
        found = [p.grad.clone() for p in net.parameters()]
        with model.no_sync():
            net.zero_grad()
            for replica in range(replicas):
                for loss in parts(step, replica, batch[replica]):
                    (loss / replicas).backward()
        for mine, parameter in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)


@CHECKS.check
def a_gradient_after_its_bucket_left() -> None:
    grow()
    grow(overlapping_allreduce=False, gradient_as_bucket_view=True)


@CHECKS.check
def steps_without_backward() -> None:
    """Evaluation moves nothing; a replica that skips a backward pass counts as zero."""
    torch.manual_seed(2)
    net = Plain()
    weft.init({"microbatches": 1})
    model = weft.DistributedModel(net, bucket_cap_mb=TINY)
    x = inputs(net, 1)[0]

    @weft.step(non_split_inputs=["train"])
    def step(model: Any, x: Tensor, train: bool) -> Tensor:
        loss = loss_of(model, x, 0)
        if train:
            model.backward(loss)
        return loss

    step(model, x, False)
    assert all(p.grad is None for p in net.parameters())
    step(model, x, True)
    whole = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    step(model, x, False)
    assert all(p.grad is None for p in net.parameters())
    alone = []
    for replica in range(weft.dp_size()):
        step(model, x, weft.dp_rank() == replica)
        alone.append([p.grad.clone() for p in net.parameters()])
        net.zero_grad()
    for all_of_them, *each in zip(whole, *alone, strict=True):
        torch.testing.assert_close(all_of_them, sum(each))


@CHECKS.check
def gradients_that_somebody_holds() -> None:
    """No later step writes into a gradient that was set to None, and a tensor that was given as `.grad` stays it."""
    torch.manual_seed(9)
    net = Plain()
    weft.init({"microbatches": 2})
    model = weft.DistributedModel(net, bucket_cap_mb=TINY)
    train_step = step_of(loss_of, non_split_inputs=["step"])
    first, second, third = inputs(net, 3)
    for step, x in enumerate((first, second)):
        net.zero_grad()
        train_step(model, x, step)
        held = [p.grad for p in net.parameters()]
        before = [grad.clone() for grad in held]
    net.zero_grad()
    train_step(model, third, 2)
    assert all(map(torch.equal, held, before))
    expected = [p.grad.clone() for p in net.parameters()]
    own = [torch.zeros_like(p) for p in net.parameters()]
    for parameter, grad in zip(net.parameters(), own, strict=True):
        parameter.grad = grad
    train_step(model, third, 2)
    assert all(p.grad is grad for p, grad in zip(net.parameters(), own, strict=True))
    for grad, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


@CHECKS.check
def hooks_of_the_script() -> None:
    """A script's own hook for arrived gradients finds them, where buckets would have left long ago."""
    torch.manual_seed(9)
    net = Plain()
    weft.init({"microbatches": 1})
    model = weft.DistributedModel(net, bucket_cap_mb=TINY)
    seen: dict[int, Tensor] = {}
    for number, parameter in enumerate(net.parameters()):
        parameter.register_post_accumulate_grad_hook(
            lambda p, number=number: seen.update({number: p.grad.clone()})
        )
    train_step = step_of(partial(loss_of, step=0))
    for x in inputs(net, 3):
        net.zero_grad()
        train_step(model, x)
        averaged = [p.grad.clone() for p in net.parameters()]
        with model.no_sync():
            net.zero_grad()
            loss_of(net, x, 0).backward()
        for number, (average, parameter) in enumerate(zip(averaged, net.parameters(), strict=True)):
            torch.testing.assert_close(seen[number], parameter.grad)
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(average, parameter.grad / dist.get_world_size())


@CHECKS.check
def outside_of_a_step() -> None:
    """With one partition a step is optional."""
    torch.manual_seed(4)
    net = Plain()
    reference = copy.deepcopy(net)
    ddp, model = (
        DistributedDataParallel(reference.to(device())),
        weft.DistributedModel(net, bucket_cap_mb=TINY),
    )
    for step, x in enumerate(inputs(net, 3)):
        for trained in (ddp, model):
            trained.zero_grad()
            loss_of(trained, x, step).backward()
        for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@CHECKS.check
def freezing() -> None:
    """What is trained may change, on all replicas at once; if it does on one alone, that is told everywhere."""
    torch.manual_seed(6)
    net = Plain()
    weft.init({"microbatches": 1})
    model = weft.DistributedModel(net, bucket_cap_mb=TINY)
    train_step = step_of(loss_of, non_split_inputs=["step"])
    first = next(net.parameters())
    for step, x in enumerate(inputs(net, 4)):
        first.requires_grad_(step != 1)
        net.zero_grad()
        train_step(model, x, step)
        for parameter in net.parameters():
            assert (parameter.grad is None) == (not parameter.requires_grad)
            if parameter.grad is not None:
                other = parameter.grad.clone()
                dist.broadcast(other, 0)
                assert torch.equal(other, parameter.grad)
    first.requires_grad_(weft.dp_rank() == 0)
    try:
        train_step(model, x, 4)
    except DivergenceError as error:
        all_but_one = f"{weft.dp_size() - 1} of {weft.dp_size()}"
        assert f"{all_but_one} replicas have changed which parameters are trained" in str(error)
    else:
        raise AssertionError("no error")


@CHECKS.check
def wrong_options() -> None:
    for options, text in (
        ({"bucket_cap_mb": 0}, "bucket_cap_mb is 0: give a number of MiB above 0"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step is 0: give a whole number"),
    ):
        try:
            weft.DistributedModel(Plain(), **options)
        except UsageError as error:
            assert text in str(error)
        else:
            raise AssertionError("no error")


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: weft.init({}))
