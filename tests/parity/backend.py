"""Two ranks of a script written for PyTorch's DDP, with weft's backend; started by `test_data_parallel.py`.

python -m weft run -n 2 tests/parity/backend.py weft
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft.torch.data_parallel as data_parallel
from tests.parity.data_parallel_models import Convolutions, Plain, Sometimes, Wide
from weft.compat.dataparallel import data_parallel as smdistributed
from weft.errors import ConfigError, UsageError


def check_collectives(name: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == name and size == 2
    places = (
        data_parallel.rank(),
        data_parallel.size(),
        data_parallel.local_rank(),
        data_parallel.local_size(),
    )
    assert places == (rank, 2, rank, 2)
    assert data_parallel.is_available() and data_parallel.is_initialized()
    assert data_parallel.scale_lr(0.25, 64, base_batch_size=128) == 0.25, "two processes, without weft.init"
    for group in (None, dist.new_group([0, 1])):
        for operation, expected in (("SUM", 3.0), ("AVG", 1.5), ("MIN", 1.0), ("MAX", 2.0)):
            tensor = torch.full((5,), float(rank + 1))
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group=group)
            assert tensor.tolist() == [expected] * 5, operation
        for count in (100_000, 100_003):  # by an algorithm of weft's
            large = torch.full((count,), float(rank + 1))
            work = dist.all_reduce(large, group=group, async_op=True)
            work.wait()
            dist.all_reduce(large, dist.ReduceOp.AVG, group=group)
            assert large.min() == large.max() == 3.0
        tensor = torch.full((3,), rank + 1)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.tolist() == [3] * 3
        check_whole_averages(group)
        dist.broadcast(tensor.fill_(rank), 1, group=group)
        assert tensor.tolist() == [1] * 3
        parts = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
        assert torch.stack(parts).tolist() == [[0, 0], [1, 1]]
        dist.barrier(group=group)
    beside = dist.new_group([0, 1], backend="gloo")
    dist.all_reduce(tensor, group=beside)
    assert tensor.tolist() == [2] * 3 and dist.get_backend(beside) == "gloo"


def check_whole_averages(group) -> None:
    """Averages of integers are cut to integers, as NCCL does it and Lightning asks for it."""
    values = [-3, 4 * dist.get_rank() + 1]  # the mean of -3 and -3, of 1 and 5
    values[0] -= dist.get_rank()
    for dtype in (torch.int64, torch.int32):
        tensor, given = torch.tensor(values, dtype=dtype), torch.tensor(values * 2, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
        assert tensor.tolist() == [-3, 3], tensor
        dist.reduce_scatter_tensor(tensor, given, dist.ReduceOp.AVG, group=group)
        assert tensor.tolist() == [-3, 3], tensor


def check_extremes() -> None:
    """NaN and inf of each rank, in each place, as `torch.amax` and `torch.amin` have them for one process."""
    nan, inf, rank = float("nan"), float("inf"), dist.get_rank()
    numbers = torch.tensor([1.0, -2.0, nan, inf, -inf])
    pairs = torch.cartesian_prod(numbers, numbers).T.contiguous()  # of the ranks' numbers, all
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        ranks = pairs.to(dtype)
        for op, expected in ((dist.ReduceOp.MAX, ranks.amax(0)), (dist.ReduceOp.MIN, ranks.amin(0))):
            for several in (False, True):
                found = ranks[rank].clone()
                work = dist.all_reduce(found, op, async_op=several)
                if several:
                    work.wait()
                torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
            for root in range(2):
                found = ranks[rank].clone()
                dist.reduce(found, root, op)
                if rank == root:
                    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
            shared = ranks[rank].clone()
            smdistributed.all_reduce(shared, smdistributed.ReduceOp.MAX)
            torch.testing.assert_close(shared, ranks.amax(0), equal_nan=True, rtol=0, atol=0)
    weight = nn.Parameter(torch.full((3,), float(rank)))
    dist.all_reduce(weight, dist.ReduceOp.MAX)
    assert weight.tolist() == [1.0] * 3
    whole = torch.tensor([rank, -rank])
    dist.all_reduce(whole, dist.ReduceOp.MIN)
    assert whole.tolist() == [0, -1]


def train(model: Any, net: Any, steps: int, accumulate: int = 1) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        model(net.batch(numbers), step).pow(2).mean().backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in net.parameters()]


def check_training(gloo: Any) -> None:
    """An unchanged script's DDP, and weft's own, against PyTorch's over gloo."""
    torch.manual_seed(dist.get_rank())
    for make, options in (
        (Plain, {}),
        (Sometimes, {"find_unused_parameters": True}),
        (Convolutions, {"gradient_as_bucket_view": True}),
        (Wide, {}),
    ):
        net: nn.Module = make()
        nets = [copy.deepcopy(net) for _ in range(4)]
        models = [
            DistributedDataParallel(nets[0], process_group=gloo, **options),
            DistributedDataParallel(nets[1], **options),
            data_parallel.DistributedDataParallel(nets[2], bucket_cap_mb=0.001, **options),
            data_parallel.DistributedDataParallel(nets[3], overlapping_allreduce=False, **options),
        ]
        expected, *others = (train(model, inside, 20) for model, inside in zip(models, nets, strict=True))
        for found in others:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def check_accumulation(gloo: Any) -> None:
    net = Plain()
    other = copy.deepcopy(net)
    reference = DistributedDataParallel(net, process_group=gloo)
    numbers = torch.Generator().manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(6):
        x = net.batch(numbers)
        if step % 3 != 2:
            with reference.no_sync():
                reference(x, step).pow(2).mean().backward()
        else:
            reference(x, step).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = train(data_parallel.DistributedDataParallel(other, backward_passes_per_step=3), other, 6, 3)
    torch.testing.assert_close(found, list(net.parameters()), rtol=1e-5, atol=1e-7)
    try:
        data_parallel.DistributedDataParallel(Plain(), backward_passes_per_step=0)
    except UsageError as error:
        assert "backward_passes_per_step is 0: give a whole number of at least 1" in str(error)
    else:
        raise AssertionError("no error")


def check_compression(gloo: Any) -> None:
    """weft's hooks, in PyTorch's DDP and in weft's own: exact without a compression, near with one."""
    torch.manual_seed(1)
    nets = [Plain() for _ in range(5)]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    hooked = DistributedDataParallel(nets[1])
    hooked.register_comm_hook(None, data_parallel.hook("int8"))
    models = [
        DistributedDataParallel(nets[0], process_group=gloo),
        hooked,
        data_parallel.DistributedDataParallel(nets[2], compression="fp16", bucket_cap_mb=0.001),
        data_parallel.DistributedDataParallel(nets[3], algorithm="shared", bucket_cap_mb=0.001),
        data_parallel.DistributedDataParallel(nets[4], algorithm="direct"),
    ]
    expected, int8, fp16, shared, direct = (
        train(model, net, 10) for model, net in zip(models, nets, strict=True)
    )
    torch.testing.assert_close(int8, expected, rtol=0.05, atol=0.002)
    torch.testing.assert_close(fp16, expected, rtol=0.005, atol=0.0002)
    for exact in (shared, direct):
        torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-7)
    for arguments, text in (
        (("int9",), "there is no compression 'int9'"),
        ((None, "ring"), "there is no algorithm 'ring'"),
    ):
        try:
            data_parallel.hook(*arguments)
        except ConfigError as error:
            assert text in str(error)
        else:
            raise AssertionError("no error")


def check_join() -> None:
    net = Plain()
    model = data_parallel.DistributedDataParallel(net)
    with model.join():
        found = train(model, net, 5 - 2 * dist.get_rank())
    for parameter in found if dist.get_rank() == 0 else net.parameters():
        other = parameter.detach().clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, parameter)


def check_all(gloo: Any) -> None:
    check_training(gloo)
    check_accumulation(gloo)
    check_compression(gloo)
    check_join()


def main() -> None:
    torch.set_num_threads(1)
    name = sys.argv[1]
    dist.init_process_group(name)
    check_collectives(name)
    check_extremes()
    gloo = dist.new_group([0, 1], backend="gloo")
    if "short" not in sys.argv:
        check_all(gloo)
    dist.barrier()
    dist.destroy_process_group()
    print("passed", flush=True)


if __name__ == "__main__":
    main()
