"""Trains a model of a given size in a process that may take only so much memory; started by `test_memory.py`.

    limited.py --partitions 3 --layers 32 --allowance 300

The limit is what the process holds after its start, plus the allowance.
"""

from __future__ import annotations

import argparse
import gc
import resource

import torch
from torch import nn

import weft.torch as weft
from tests.training import distance_from_one, step_of

WIDTH = 1024
MIB = 2**20
LAYER_MIB = WIDTH * WIDTH * 4 // MIB


def held_bytes() -> int:
    """The data of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))


train_step = step_of(distance_from_one)


def train(layers: int, width: int) -> tuple[int, int]:
    """Three steps; the size of the model, and of this rank's part, in MiB."""
    torch.manual_seed(0)
    with weft.delay_param_initialization():
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(train_step(model, torch.ones(8, width)).reduce_mean().item())
        optimizer.step()
    assert losses[-1] < losses[0], losses
    sizes = [
        sum(p.numel() for p in parameters) for parameters in (model.parameters(), model.local_parameters())
    ]
    return sizes[0] * 4 // MIB, sizes[1] * 4 // MIB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=1)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--allowance", type=int, required=True, help="MiB")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weft.init({"partitions": options.partitions, "microbatches": 4})
    train(2 * options.partitions, 160)  # what is loaded and started at first use is not the model's
    gc.collect()
    limit = held_bytes() + options.allowance * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    size, own = train(options.layers, WIDTH)
    assert size == LAYER_MIB * options.layers
    print(f"trained {size} MiB, {own} MiB here, within {options.allowance} MiB", flush=True)


if __name__ == "__main__":
    main()
