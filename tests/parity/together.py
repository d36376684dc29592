"""What ranks do together outside of a step, and what replicas share inside one; started by `test_together.py`.

    together.py --partitions 2 check...

Every rank asserts for itself; a job that ends well has passed.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.parity.compare import TOLERANCE, Comparison, copies, gradients
from tests.parity.registry import Checks
from tests.training import mean_squared_error, step_of
from weft.errors import DivergenceError, TransportError, UsageError
from weft.torch.session import current

CHECKS = Checks()
BIG = 40_000
"""Elements of a tensor that travels as a part of its own."""


@dataclasses.dataclass
class Result:
    name: str
    values: Tensor


class Odd(enum.Enum):
    ONE = 1


@contextmanager
def told(kind: type[Exception], text: str) -> Iterator[None]:
    """The block raises an error with that text."""
    try:
        yield
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error!s:.600}"
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


# --- objects ------------------------------------------------------------------------------------------------


@CHECKS.check
def objects_travel() -> None:
    rank, size = weft.rank(), weft.size()
    sent = {
        "rank": rank,
        (1, "a"): {2.5, None},
        "small": torch.full((2, 2), rank),
        "big": torch.full((BIG,), float(rank)),
        "array": numpy.arange(3),
        "result": Result("a", torch.ones(1)),
    }
    weft.barrier()
    if rank == 0:
        weft.send(sent, 1)
        answer = weft.recv_from(1, weft.RankType.WORLD_RANK)
        assert answer == "thanks"
        weft.broadcast([sent["big"], "all"])
    else:
        if rank == 1:
            back = weft.recv_from(0)
            assert list(back) == list(sent) and back["rank"] == 0 and back[(1, "a")] == {2.5, None}
            assert torch.equal(back["big"], sent["big"] * 0) and back["small"].tolist() == [[0, 0], [0, 0]]
            assert back["array"].tolist() == [0, 1, 2] and back["result"].values.tolist() == [1]
            weft.send("thanks", 0)
        values, text = weft.recv_from(0)
        assert values.shape == (BIG,) and text == "all"
    everyone = weft.allgather(sent)
    assert [item["rank"] for item in everyone] == list(range(size))
    assert all(item["big"][-1] == number for number, item in enumerate(everyone))
    assert [item["result"].name for item in everyone] == ["a"] * size
    assert weft.allgather("x" * rank) == ["x" * number for number in range(size)]


@CHECKS.check
def groups_are_those_of_the_mesh() -> None:
    for axis in ("world", "mp", "dp", "tp", "pp", "rdp"):
        group = weft.CommGroup(axis)
        ranks = list(getattr(weft, f"get_{axis}_group")())
        assert weft.allgather(weft.rank(), group) == ranks
        weft.barrier(group)
        if len(ranks) > 1:
            kind = weft.RankType(axis)
            if weft.rank() == ranks[-1]:
                weft.send(axis, 0, kind)
                weft.broadcast(axis * 2, group)
            elif weft.rank() == ranks[0]:
                assert weft.recv_from(len(ranks) - 1, kind) == axis
            if weft.rank() != ranks[-1]:
                assert weft.recv_from(len(ranks) - 1, kind) == axis * 2
    weft.mp_barrier()
    weft.dp_barrier()


@CHECKS.check
def mistakes_are_told_before_anything_is_sent() -> None:
    other = 1 - weft.rank() if weft.rank() < 2 else 0
    with told(TransportError, "the object['x'][1] is of type __main__.Odd, which cannot travel"):
        weft.send({"x": [0, Odd.ONE]}, other)
    with told(TransportError, "the object is of type"):
        weft.allgather(Odd.ONE)
    with told(UsageError, f"dest_rank is {weft.size()}, but WORLD_RANK counts from 0 to {weft.size() - 1}"):
        weft.send(1, weft.size())
    with told(UsageError, "is this rank itself"):
        weft.recv_from(weft.rank())
    with told(UsageError, "group is 'world', it must be one of CommGroup.WORLD"):
        weft.barrier("world")  # type: ignore[arg-type]
    with told(UsageError, "rank_type is CommGroup.WORLD, it must be one of RankType.WORLD_RANK"):
        weft.send(1, other, weft.WORLD)  # type: ignore[arg-type]
    assert weft.allgather(Odd.ONE, allow_pickle=True) == [Odd.ONE] * weft.size()
    weft.barrier()


@CHECKS.check
def different_calls_meet_as_an_error() -> None:
    """Both ranks are told, at once, and the next calls are not disturbed."""
    one, two = (weft.rank() == 0, weft.rank() == 1)
    tries: list[tuple[Callable[[], Any], Callable[[], Any], str, str]] = [
        (lambda: weft.send(1, 1), lambda: weft.send(2, 0), "send()", "send()"),
        (lambda: weft.send(1, 1), lambda: weft.allgather(2), "send()", "allgather(WORLD)"),
        (lambda: weft.recv_from(1), weft.barrier, "recv_from()", "barrier(WORLD)"),
        (weft.barrier, lambda: weft.recv_from(0), "barrier(WORLD)", "recv_from()"),
        (weft.barrier, lambda: weft.allgather(1), "barrier(WORLD)", "allgather(WORLD)"),
        (lambda: weft.allgather(1), lambda: weft.send(1, 0), "allgather(WORLD)", "send()"),
        (weft.barrier, lambda: weft.barrier(weft.PP_GROUP), "barrier(WORLD)", "barrier(PP_GROUP)"),
    ]
    for first, second, *calls in (
        tries if weft.size() == 2 else ()
    ):  # else the others would wait for the group
        for text in ("allgather and barrier are called by the whole group", *calls):
            with told(DivergenceError, text):
                (first if one else second)()
    big = torch.zeros(1000)
    if one:
        with told(
            TransportError, "rank 1 does not take the object of rank 0: its tensors and arrays have 4000"
        ):
            weft.send(big, 1)
        with told(TransportError, "pickled, which needs allow_pickle=True here too"):
            weft.send(Odd.ONE, 1, allow_pickle=True)
    elif two:
        with told(TransportError, "more than max_bytes=100"):
            weft.recv_from(0, max_bytes=100)
        with told(TransportError, "needs allow_pickle=True"):
            weft.recv_from(0)
    weft.barrier()
    with told(TransportError, "allgather() does not take the object of rank 0: its tensors"):
        weft.allgather(big, max_bytes=100)
    weft.barrier()


# --- mixed precision ----------------------------------------------------------------------------------------


def tail() -> nn.Module:
    """All parameters on partition 0; the last rank computes without any."""
    return models.Stack(layer=nn.Linear(8, 8), act=nn.Tanh())


@weft.step
def scaled_step(model: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        loss = F.mse_loss(model(x), y)
    model.backward(scaler.scale(loss))
    return loss


@CHECKS.check
def the_scaler_agrees_on_every_rank() -> None:
    """An overflow that one rank sees skips the step of all; everything else is as with PyTorch's on one process."""
    for fused in (False, True):
        torch.manual_seed(5)
        net = tail()
        alone = copy.deepcopy(net)
        model = weft.DistributedModel(net)
        optimizer = weft.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3, fused=fused)
        )
        scaler = weft.amp.GradScaler(init_scale=8.0, growth_interval=2)
        theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        reference = torch.optim.AdamW(alone.parameters(), lr=0.1, eps=1e-3)
        numbers = torch.Generator().manual_seed(1)
        for number in range(6):
            x, y = torch.randn(2, 4 * weft.dp_size(), 8, generator=numbers)
            if number == 3:
                y[-1, -1] = torch.inf
            rows = slice(4 * weft.dp_rank(), 4 * weft.dp_rank() + 4)
            optimizer.zero_grad()
            scaled_step(model, scaler, x[rows], y[rows])
            if number == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            reference.zero_grad()
            theirs.scale(F.mse_loss(alone(x), y)).backward()
            theirs.step(reference)
            theirs.update()
            scales = weft.allgather(scaler.get_scale())
            assert scales == [theirs.get_scale()] * weft.size(), (number, scales, theirs.get_scale())
        comparison = Comparison(TOLERANCE)
        comparison.tensors(
            "parameters", copies(model.local_named_parameters()), copies(alone.named_parameters())
        )
        assert comparison.ok, comparison.report()
    if weft.pp_size() > 1:
        assert sorted(weft.allgather(len(list(model.local_parameters())), weft.PP_GROUP)) == [0, 2]


# --- BatchNorm and large batches ----------------------------------------------------------------------------


def normalised() -> nn.Module:
    """BatchNorm of three kinds, in all stages; without biases before it, whose gradients would be rounding noise."""
    convolve, linear = (
        partial(nn.Conv2d, kernel_size=3, padding=1, bias=False),
        partial(nn.Linear, bias=False),
    )
    return models.Stack(
        a=nn.Sequential(convolve(1, 4), nn.BatchNorm2d(4), nn.ReLU()),
        b=nn.Sequential(convolve(4, 4), nn.BatchNorm2d(4, momentum=None), nn.ReLU()),
        c=nn.Sequential(nn.Flatten(), linear(64, 8), nn.BatchNorm1d(8, affine=False), nn.ReLU()),
        d=nn.Sequential(linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
    )


plain_step = step_of(mean_squared_error)


MICROBATCHES, ROWS = 4, 8


@CHECKS.check
def batch_norm_over_replicas_is_that_of_one_process() -> None:
    """Microbatch m of all replicas together: statistics, gradients, running values, over steps and evaluation."""
    torch.manual_seed(2)
    net = normalised()
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(weft.convert_sync_batchnorm(net))
    assert [type(part).__name__ for part in net.modules()].count("SyncBatchNorm") == 4
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(4)
    replicas = weft.rdp_size()
    comparison = Comparison(TOLERANCE)
    for number in range(3):
        x = torch.randn(MICROBATCHES, replicas, ROWS, 1, 4, 4, generator=numbers)
        y = torch.randn(MICROBATCHES, replicas, ROWS, 2, generator=numbers)
        optimizer.zero_grad()
        plain_step(model, x[:, weft.rdp_rank()].flatten(0, 1), y[:, weft.rdp_rank()].flatten(0, 1))
        reference.zero_grad()
        for part in range(MICROBATCHES):
            loss = F.mse_loss(alone(x[part].flatten(0, 1)), y[part].flatten(0, 1))
            (loss / MICROBATCHES).backward()
        expected = gradients(alone.named_parameters())
        comparison.tensors(f"gradients {number}", gradients(model.local_named_parameters()), expected)
        optimizer.step()
        reference.step()
    comparison.tensors("state", copies(model.state_dict().items()), copies(alone.state_dict().items()))
    assert comparison.ok, comparison.report()


@CHECKS.check
def few_samples_for_batch_norm_are_warned_of() -> None:
    torch.manual_seed(weft.dp_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for convert in (False, True):
            net = normalised()
            model = weft.DistributedModel(weft.convert_sync_batchnorm(net) if convert else net)
            rows = MICROBATCHES * (15 if not convert else 8)
            for _ in range(2):
                plain_step(model, torch.randn(rows, 1, 4, 4), torch.randn(rows, 2))
    found = [str(one.message) for one in caught if "BatchNorm (" in str(one.message)]
    assert len(found) == (weft.rank() == 0), found
    assert all("(a.1 and 3 more) sees 15 samples at a time" in text for text in found)


@CHECKS.check
def the_loss_is_a_mean_over_the_global_batch() -> None:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    alone = copy.deepcopy(net)
    model = weft.DistributedModel(net)
    rows = [4 * (replica + 1) for replica in range(weft.dp_size())]
    x, y = torch.randn(sum(rows), 8), torch.randn(sum(rows), 2)
    mine = slice(sum(rows[: weft.dp_rank()]), sum(rows[: weft.dp_rank() + 1]))
    weight = weft.global_batch_weight(rows[weft.dp_rank()])
    step = step_of(lambda model, x, y, weight: F.mse_loss(model(x), y) * weight, non_split_inputs=["weight"])
    step(model, x[mine], y[mine], weight)
    F.mse_loss(alone(x), y).backward()
    comparison = Comparison(TOLERANCE)
    mine_now = gradients(model.local_named_parameters())
    comparison.tensors("gradients", mine_now, gradients(alone.named_parameters()))
    assert comparison.ok, comparison.report()


@CHECKS.check
def data_is_shuffled_once_and_divided() -> None:
    torch.manual_seed(weft.rank())  # the seed of rank 0 counts
    data = list(range(16 * weft.dp_size()))
    sampler = weft.shared_sampler(data)
    sampler.set_epoch(1)
    parts = weft.allgather(list(sampler))
    for rank, part in enumerate(parts):
        same = current.session().mesh.position("dp", rank) == weft.dp_rank()
        assert (part == parts[weft.rank()]) == same
    replicas = {tuple(part) for part in parts}
    assert sorted(number for part in replicas for number in part) == data
    tensors = torch.utils.data.TensorDataset(torch.arange(float(len(data))))
    loader = torch.utils.data.DataLoader(tensors, batch_size=4, sampler=sampler)
    before = torch.get_rng_state()
    weft.check_loader(loader)
    assert torch.equal(torch.get_rng_state(), before)
    if weft.dp_size() > 1:
        with told(
            DivergenceError, "have the same first batch: shard the data by weft.dp_rank():\n    sampler = "
        ):
            weft.check_loader(torch.utils.data.DataLoader(tensors, batch_size=4))
    if weft.pp_size() > 1:
        with told(DivergenceError, "belong to one replica, but their first batches differ"):
            weft.check_batch(torch.tensor([weft.rank()]))
    with told(DivergenceError, "the data loader of rank 0 has no batch"):
        weft.check_loader([])
    with told(UsageError, "use up its first batch"):
        weft.check_loader(iter([1]))


@CHECKS.check
def calls_inside_a_step_are_refused() -> None:
    model = weft.DistributedModel(nn.Linear(2, 2))

    @weft.step
    def step(model: Any, x: Tensor) -> Tensor:
        with told(UsageError, "barrier() was called inside a weft.step function"):
            weft.barrier()
        loss = model(x).sum()
        model.backward(loss)
        return loss

    step(model, torch.ones(4, 2))


def start() -> None:
    warnings.simplefilter("error")
    given = CHECKS.given
    settings = {"partitions": given.partitions, "microbatches": MICROBATCHES, "pipeline": given.pipeline}
    weft.init({**settings, "ddp": True})


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], start)
