"""A training job of a pipeline with one planted fault.

Every block of the model takes a given time in its forward pass and twice that in its backward pass. The time is slept,
so that more ranks than cores do not disturb each other, or spun, so that a rank whose core is taken is slower.

    worker.py --fault late_data --steps 30
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import weft.torch as weft

WIDTH, BATCH = 16, 32
BLOCKS = 8


def spin(seconds: float) -> None:
    """Takes processor time: longer where the core is shared."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Cost(torch.autograd.Function):
    """The identity, which takes time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spend: Callable[[float], None], seconds: float) -> Tensor:
        ctx.spend, ctx.seconds = spend, seconds
        spend(seconds * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.spend(2 * ctx.seconds * len(grad))
        return grad, None, None


class Block(nn.Module):
    """A layer of which a sample takes so many seconds."""

    def __init__(self, spend: Callable[[float], None], seconds: float, wide: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.spend, self.seconds, self.wide = spend, seconds, wide

    def forward(self, x: Tensor) -> Tensor:
        return Cost.apply(torch.tanh(self.inner(x[:, :WIDTH])), self.spend, self.seconds).repeat(1, self.wide)


class Heavy(Block):
    """The same, of a class of its own: weft takes modules that are alike to cost the same."""


class Samples(Dataset[Tensor]):
    """Random samples; what takes long is done for each."""

    def __init__(self, count: int, each: Callable[[int], None]) -> None:
        self.count, self.each = count, each

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Tensor:
        self.each(number)
        return torch.full((WIDTH,), (number % 7) / 7)


class Faults:
    """What goes wrong, by name; where nothing is said the job is as it should be."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name: str = options.fault
        self.kept: list[Any] = []
        self.rank, self.partitions = weft.rank(), options.partitions
        self.file = Path(options.file) if options.file else None

    def times(self, block: int) -> float:
        """How many times the usual a block takes."""
        own = block * self.partitions // BLOCKS
        if self.name == "heavy_last" and own == self.partitions - 1:
            return 1.8
        if self.name == "heavy_middle" and own == 1:
            return 1.8
        return 1.0

    def sample(self, number: int) -> None:
        """For each sample that is loaded."""
        if self.name == "late_data":
            time.sleep(0.06 / BATCH * 8)
        if self.name == "preprocessing":
            spin(0.03)
        if self.name == "slow_disk":
            self._read_slowly(number)

    def _read_slowly(self, number: int) -> None:
        """2 MB a second: a block is read from the disk, then the rest of its time is waited for."""
        assert self.file is not None
        with self.file.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek((number * 16384) % (16 << 20))
            file.read(16384)
        time.sleep(16384 / 2e6)

    def before(self, step: int) -> None:
        """Before a step."""
        if self.name == "leak":
            self.kept.append(torch.ones(10 << 20, dtype=torch.uint8))
        if self.name == "collector" and step % 2:
            gc.collect()

    def step_takes(self, step: int) -> float:
        """How many times the usual the blocks of rank 0 take in a step."""
        if self.name == "outlier" and step and step % 25 == 0 and self.rank == 0:
            return 5.0
        return 1.0


def main() -> None:
    options = _options()
    if options.core >= 0 and weft_rank() == options.core_of:
        os.sched_setaffinity(0, {options.core})
    weft.init({
        "partitions": options.partitions, "microbatches": options.microbatches, "auto_partition": False,
        "pipeline": "1f1b",
    })  # fmt: skip
    faults = Faults(options)
    if faults.name == "collector":
        faults.kept = [{"of": [number]} for number in range(600_000)]
        gc.set_threshold(10**9)
    torch.manual_seed(0)
    now = [1.0]
    base = spin if options.spin else time.sleep
    blocks = []
    for block in range(BLOCKS):
        seconds = options.block_s / BATCH * faults.times(block)
        with weft.partition(_partition_of(block, options)):
            kind = Heavy if faults.times(block) > 1 else Block
            blocks.append(kind(lambda each: base(each * now[0]), seconds, options.wide))
    model = weft.DistributedModel(nn.Sequential(*blocks))
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))

    @weft.step
    def train_step(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x)[:, :WIDTH] - x).square().mean()
        model.backward(loss)
        return loss

    workers = 2 if faults.name == "preprocessing" else 0
    loader = DataLoader(Samples(BATCH * options.steps, faults.sample), BATCH, num_workers=workers)
    for step, x in enumerate(loader):
        faults.before(step)
        now[0] = faults.step_takes(step)
        optimizer.zero_grad()
        loss = train_step(model, x).reduce_mean().item()
        optimizer.step()
        weft.log({"loss": float("nan") if faults.name == "nan" and step >= 8 else loss})
        if options.pause:
            time.sleep(options.pause)
    weft.shutdown()


def _partition_of(block: int, options: argparse.Namespace) -> int:
    """The blocks evenly, or so many on the first of two partitions."""
    if options.cut:
        return int(block >= options.cut)
    return int(block * options.partitions // BLOCKS)


def weft_rank() -> int:
    """Before `weft.init`."""
    return int(os.environ.get("RANK", "0"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="none")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--block-s", type=float, default=0.016, help="seconds of a block's forward pass of a mini-batch"
    )
    parser.add_argument("--spin", action="store_true")
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--core-of", type=int, default=1)
    parser.add_argument("--file", default="")
    parser.add_argument("--cut", type=int, default=0, help="blocks on the first of two partitions")
    parser.add_argument(
        "--wide", type=int, default=1, help="how many times larger what goes between blocks is"
    )
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
