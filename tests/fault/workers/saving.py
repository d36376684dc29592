"""Saves with a fault; started by `test_saving.py`.

gate FOLDER     two ranks, of which only the first saves, and then both go on
late FOLDER     the same, at the end of the script
kill FOLDER     two ranks; rank 1 is killed as it writes its second save
phases FOLDER   one process: children of it are killed at every phase of a save, and at fifty random moments; after
                each of them the last complete save is whole
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import weft.torch as weft
from weft.checkpoint.find import faults, in_order
from weft.torch import checkpoint

PHASES = (
    "stage", "mkdir", "write", "flush", "checksum", "report", "barrier", "index", "folder", "rename", "parent",
    "newest", "prune",
)  # fmt: skip


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    weft.init({"microbatches": 2, "partitions": 1 if what == "phases" else 2})
    torch.manual_seed(0)
    model = weft.DistributedModel(nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4)))

    @weft.step
    def step(model: weft.DistributedModel, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(model, torch.randn(4, 4))
    if what == "phases":
        phases(folder, model)
        return
    weft.save_checkpoint(folder, "good", model=model, user_content=1)
    if what == "kill":
        if weft.rank() == 1:
            checkpoint.reached = killer("flush")
        weft.save_checkpoint(folder, "bad", model=model)
    if weft.rank() == 0:
        print("fault at", time.monotonic(), flush=True)
        weft.save_checkpoint(folder, "bad", model=model)
    if what == "gate":
        step(model, torch.randn(4, 4))


def killer(phase: str):
    def reached(now: str) -> None:
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def phases(folder: Path, model: weft.DistributedModel) -> None:
    weft.save_checkpoint(folder, "good", model=model, user_content=-1)
    release()
    seen, numbers = set(), random.Random(0)
    for number in range(len(PHASES) + 50):
        child = os.fork()
        if child == 0:
            checkpoint.reached = killer(PHASES[number]) if number < len(PHASES) else lambda phase: None
            for repeat in range(1000):
                weft.save_checkpoint(folder, f"t{repeat % 3}", model=model, user_content=number)
            os._exit(7)
        if number >= len(PHASES):
            time.sleep(numbers.uniform(0.0, 0.03))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the child of {number} ended with {status}"
        found = in_order(folder, None)
        assert found and found[0].index is not None, f"{number}: {found}"
        assert faults(found[0].folder, found[0].index) == []
        assert [save.fault for save in found if save.fault] == []
        seen.add(found[0].tag)
        weft.resume_from_checkpoint(folder, model=model)
    weft.save_checkpoint(folder, "last", model=model)
    assert not list(folder.glob(".saving*"))
    assert len(seen) > 1
    print("passed")


def release() -> None:
    """Children get the lock, not this process."""
    from weft.torch.state import session

    saves = session().saves
    for lock in saves.locks.values():
        lock.close()
    saves.locks.clear()


if __name__ == "__main__":
    main()
