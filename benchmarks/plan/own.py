"""A job beside the plan that it has made itself: six models on two processes, step time and memory.

    python -m benchmarks.plan.own

Memory is resident memory above what was resident before the first step beside the model, less what libraries take: that
is what two layers of 8 x 8 weights have. Freed memory goes back to the system at once (`MALLOC_MMAP_THRESHOLD_`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from weft.analysis.analysis import Analysis
from weft.analysis.plan.comparison import beside_plan
from weft.profiler.reading import read_run

WIDTH = 384
STEPS = 24
MIB = 2**20
MODELS = ("tiny", "transformer", "checkpoints", "zbv", "convolutions", "uneven", "wide")


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, 6, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.after(x))))


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The model of that name, and its mini-batch."""
    torch.manual_seed(0)
    if name == "tiny":
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)
    if name == "convolutions":
        sizes = ((3, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=stride), nn.BatchNorm2d(b), nn.ReLU())
            for a, b, stride in sizes
        ]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
        return nn.Sequential(*layers, *head), torch.randn(32, 3, 32, 32)
    if name == "uneven":
        widths = [256, 2048, 512, 1024, 256, 4096, 256, 512, 1024]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:], strict=False)]
        return nn.Sequential(*layers), torch.randn(512, 256)
    if name == "wide":
        layers = [nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)) for _ in range(4)]
        return nn.Sequential(*layers), torch.randn(256, 2048)
    blocks = nn.Sequential(*[Block() for _ in range(8)])
    if name == "checkpoints":
        for block in blocks:
            weft.set_activation_checkpointing(block)
    return blocks, torch.randn(16, 128, WIDTH)


def train(name: str) -> None:
    """One rank of the job."""
    weft.init(partitions=2, microbatches=4, **({"pipeline": "zbv"} if name == "zbv" else {}))
    network, x = model_of(name)
    model = weft.DistributedModel(network)
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-4))

    @weft.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    for _ in range(STEPS):
        train_step(model, x)
        optimizer.step()
        optimizer.zero_grad()


def measured(name: str) -> Any:
    """The run of that model beside its plan."""
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "weft",
            "run",
            "-n",
            "2",
            "--record",
            folder,
            "-m",
            "benchmarks.plan.own",
            name,
        ]
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        return beside_plan(Analysis(read_run(Path(folder))))


def main() -> None:
    print("| model | planned ms | measured ms | error | planned MiB | measured MiB | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    libraries = 0.0
    for name in MODELS:
        found = measured(name)
        if name == "tiny":
            libraries = max(one.measured for one in found.memory)
            continue
        fullest = max(found.memory, key=lambda one: one.measured)
        memory = fullest.measured - libraries
        print(
            f"| {name} | {found.step.planned * 1e3:.0f} | {found.step.measured * 1e3:.0f} "
            f"| {found.step.planned / found.step.measured - 1:+.0%} | {fullest.planned / MIB:.0f} | {memory / MIB:.0f} "
            f"| {fullest.planned / memory - 1:+.0%} |",
            flush=True,
        )
    print(f"\nlibraries: {libraries / MIB:.0f} MiB")


if __name__ == "__main__":
    train(sys.argv[1]) if sys.argv[1:] else main()
