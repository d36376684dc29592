"""A training whose replicas may be lost: each rank writes down its losses and weights after every step.

rejoining.py FOLDER STEPS FAULTS SLEEP_S

FAULTS is a list of [rank, start, moment, step]: that rank, started so often before in the first attempt, kills itself
there. A moment is a
word of `weft.reduce.members`, as it is about to be written; "after" and a word, right after that; or "step".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft.torch as weft
from weft.launch.discovery import REPLICA
from weft.reduce.members import Table, Word
from weft.torch.session import current

BATCH, MICROBATCHES, SEED = 8, 2, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)
    )


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(320, 8, generator=torch.Generator().manual_seed(5)))


def print_of(weight: torch.Tensor) -> float:
    """A number that differs where weights differ."""
    return float(weight.detach().reshape(-1) @ torch.linspace(1, 2, weight.numel()))


def arm(faults: list[list[Any]], start: int) -> None:
    """Kill this process where the faults say so."""
    mine = {(moment, step) for rank, at, moment, step in faults if (rank, at) == (weft.rank(), start)}
    put = Table.put

    def put_and_die(self: Table, replica: int, position: int, word: Word, value: int) -> None:
        step = (value & 0xFFFFFFFF) - 1
        die("", word, step)
        put(self, replica, position, word, value)
        die("after ", word, step)

    def die(when: str, word: Word, step: int) -> None:
        if {(f"{when}{word.name}", step), (f"{when}{word.name}", None)} & mine:
            os.kill(os.getpid(), signal.SIGKILL)

    Table.put = put_and_die


def main(folder: Path, steps: int, faults: list[list[Any]], sleep_s: float) -> None:
    torch.set_default_dtype(torch.float64)
    weft.init(microbatches=MICROBATCHES)
    start = int(os.environ[REPLICA].split(":")[3]) + 1000 * int(os.environ["WEFT_ATTEMPT"])
    arm(faults, start)
    model = weft.DistributedModel(make_model())
    optimizer = weft.DistributedOptimizer(make_optimizer(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = samples()
    loader = DataLoader(data, BATCH, sampler=weft.shared_sampler(data, seed=SEED))

    @weft.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    with (
        weft.checkpoints(folder / "saves", every=10, also={"scheduler": scheduler}) as run,
        open(folder / f"log-{weft.rank()}.jsonl", "a") as file,
    ):
        for (x,) in run.batches(loader, steps=steps):
            began = run.step
            if [weft.rank(), start, "step", began] in faults:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = train_step(model, x).reduce_mean()
            weft.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            weights = {
                name.removeprefix("module."): print_of(p) for name, p in model.local_named_parameters()
            }
            buffers = {
                name.removeprefix("module."): print_of(b.double()) for name, b in model.local_named_buffers()
            }
            row = {
                "began": began, "step": run.step, "loss": loss.item(), "x": x.sum().item(),
                "counted": current.session().rejoin.counted, "prints": weights | buffers, "time": time.monotonic(),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            file.flush()
            time.sleep(sleep_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4]))
