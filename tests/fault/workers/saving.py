"""Saves with a fault; started by `test_saving.py`.

gate FOLDER     two ranks, of which only the first saves, and then both go on
kill FOLDER     two ranks; rank 1 is killed as it writes its second save
last FOLDER     any number of ranks; the script ends while an asynchronous save goes on, which fails
leave FOLDER    the same, but the script calls shutdown
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import weft.torch as weft
from weft.torch.checkpoint import save


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    weft.init({"microbatches": 2, "partitions": int(os.environ.get("WORLD_SIZE", "1"))})
    torch.manual_seed(0)
    model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)))

    @weft.step
    def step(model: weft.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.randn(4, 4))
    weft.save_checkpoint(folder, "good", model=model, user_content=1)
    if what in ("last", "leave"):
        save.reached = full_disk
        weft.save_checkpoint(folder, "bad", model=model, asynchronous=True)
        if what == "leave":
            weft.shutdown()
        return
    if what == "kill":
        if weft.rank() == 1:
            save.reached = killer("flush")
        weft.save_checkpoint(folder, "bad", model=model)
    if weft.rank() == 0:
        print("fault at", time.monotonic(), flush=True)
        weft.save_checkpoint(folder, "bad", model=model)
    step(model, torch.randn(4, 4))


def full_disk(now: str) -> None:
    if now == "index":
        time.sleep(0.5)
        raise OSError(errno.ENOSPC, "No space left on device")


def killer(phase: str):
    def reached(now: str) -> None:
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


if __name__ == "__main__":
    main()
