"""One rank: saves and loads its part of a model in each way, in turns; rank 0 tells the times as JSON lines.

Every way flushes to the disk before its time ends, and reads what the system no longer holds in memory.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import weft.torch as weft

WIDTH, ROWS = 1024, 8
LAYER_MIB = 4
STEPS = 8


class Job:
    """A model, trained as a pipeline, and the ways to save it."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder, self.mib = folder, mib
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib // LAYER_MIB)]
        self.model = weft.DistributedModel(nn.Sequential(*layers))

        @weft.step
        def train_step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).pow(2).mean()
            model.backward(loss)
            return loss

        self.train_step = train_step
        self.step()
        named = self.model.module.named_parameters()
        self.own = {name: p.detach() for name, p in named if self.model.is_local(name)}

    def step(self) -> None:
        self.model.zero_grad()
        self.train_step(self.model, torch.randn(ROWS, WIDTH))

    def contenders(self) -> dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]]:
        return {
            "disk": (self.write_disk, self.read_disk),
            "weft": (self.save, lambda path: self.resume(path, "full")),
            "weft, verify=sizes": (self.save, lambda path: self.resume(path, "sizes")),
            "torch.save": (self.write_torch, self.read_torch),
            "torch.distributed.checkpoint": (
                lambda path: dcp.save(self.own, checkpoint_id=path),
                lambda path: dcp.load(self.own, checkpoint_id=path),
            ),
        }

    def write_disk(self, path: Path) -> None:
        """Zeros by dd, by one process."""
        if weft.rank() == 0:
            dd(f"if=/dev/zero of={path / 'zeros'} bs=1M count={self.mib} conv=fsync")

    def read_disk(self, path: Path) -> None:
        if weft.rank() == 0:
            dd(f"if={path / 'zeros'} of=/dev/null bs=1M")

    def save(self, path: Path) -> None:
        weft.save_checkpoint(path, "save", model=self.model)

    def resume(self, path: Path, verify: str) -> None:
        weft.resume_from_checkpoint(path, "save", model=self.model, verify=verify)

    def write_torch(self, path: Path) -> None:
        with (path / f"{weft.rank()}.pt").open("wb") as file:
            torch.save(self.own, file)
            file.flush()
            os.fsync(file.fileno())

    def read_torch(self, path: Path) -> None:
        found = torch.load(path / f"{weft.rank()}.pt", weights_only=True)
        for name, tensor in self.own.items():
            tensor.copy_(found[name])

    def asynchronous(self, path: Path) -> dict[str, float]:
        """Steps without a save, and as many as it takes beside one."""
        alone = timed(lambda: [self.step() for _ in range(STEPS)]) / STEPS
        dist.barrier()
        start = time.perf_counter()
        pending = weft.save_checkpoint(path, "beside", model=self.model, asynchronous=True)
        saved, steps = False, 0
        first = time.perf_counter()
        while not saved:
            self.step()
            steps += 1
            done = torch.tensor([int(pending.done)])
            dist.all_reduce(done)
            saved = int(done) == weft.size()
        end = time.perf_counter()
        return {
            "alone_s": alone,
            "beside_s": (end - first) / steps,
            "steps": steps,
            "blocked_s": pending.wait().blocked_s,
            "added_s": end - start - steps * alone,
        }


def dd(arguments: str) -> None:
    subprocess.run(["dd", *arguments.split()], check=True, stderr=subprocess.DEVNULL)


def timed(call: Callable[[], object]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Let the system drop what it holds of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def tell(**line: object) -> None:
    if weft.rank() == 0:
        print(json.dumps(line), flush=True)


def main(folder: Path, mib: int, rounds: int) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    weft.init({"partitions": int(os.environ["WORLD_SIZE"]), "microbatches": 2})
    torch.manual_seed(0)
    job = Job(folder, mib)
    for round in range(-1, rounds):  # the first is not counted
        for number, (who, (write, read)) in enumerate(job.contenders().items()):
            path = folder / f"{round}-{number}"
            path.mkdir(exist_ok=True)
            for what, call in (("write", write), ("read", read)):
                forget(path)
                seconds = timed(lambda call=call, path=path: call(path))
                if round >= 0:
                    tell(who=who, what=what, seconds=seconds)
            dist.barrier()
            if weft.rank() == 0:
                subprocess.run(["rm", "-r", str(path)], check=True)
        path = folder / f"{round}-beside"
        found = job.asynchronous(path)
        if round >= 0:
            tell(**found)
        dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
