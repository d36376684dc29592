"""Worker: a script for PyTorch's DDP on GPUs, with weft's backend; started by `test_training.py`."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import weft.torch.data_parallel as data_parallel

STEPS = 3


def check_collectives() -> None:
    """On both devices, through one group."""
    for device in ("cpu", "cuda"):
        for numel in (5, 100_003):
            for operation, expected in (("SUM", 3.0), ("AVG", 1.5), ("MAX", 2.0)):
                tensor = torch.full((numel,), dist.get_rank() + 1.0, device=device)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
                assert tensor.min() == tensor.max() == expected, (device, numel, operation)
        both = [torch.empty(2, device=device) for _ in range(2)]
        dist.all_gather(both, torch.full((2,), float(dist.get_rank()), device=device))
        assert torch.stack(both).tolist() == [[0, 0], [1, 1]]


def averages(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """One process's mean gradients of all ranks' batches."""
    alone = copy.deepcopy(net)
    for x in batches:
        (alone(x).pow(2).mean() / len(batches)).backward()
    return [parameter.grad for parameter in alone.parameters()]


def main() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("weft")
    check_collectives()
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
    ).cuda()
    hooks = {None: 1e-5, "plain": 1e-5, "fp16": 2e-3, "int8": 0.1}
    for name, close in hooks.items():
        model = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=0.1)
        if name is not None:
            model.register_comm_hook(None, data_parallel.hook(None if name == "plain" else name))
        for step in range(STEPS):
            batches = [torch.randn(16, 32, device="cuda") for _ in range(2)]
            expected = averages(net, batches)
            model.zero_grad()
            model(batches[dist.get_rank()]).pow(2).mean().backward()
            for parameter, wanted in zip(model.parameters(), expected, strict=True):
                apart = float((parameter.grad - wanted).abs().max() / wanted.abs().max())
                assert apart <= close, (name, step, apart)
    print("backend passed", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
