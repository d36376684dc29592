"""Worker of ``test_reductions``: what rank 0 is told when rank 1 does not do its part. No launcher watches."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.reduce.shared import SharedMemory


def told(numel: int, timeout: timedelta = timedelta(minutes=1)) -> None:
    sums = SharedMemory.connect(dist.group.WORLD, timeout)
    try:
        sums.all_reduce(torch.ones(numel)).wait()
        print("nothing")
    except WeftError as error:
        print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    rank = int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    told(1000 + rank)
    if rank == 0:
        told(10, timedelta(seconds=0.3))
        told(1_000_000)
        os._exit(0)
    silent = SharedMemory.connect(dist.group.WORLD)
    time.sleep(1)
    dead = SharedMemory.connect(dist.group.WORLD)
    assert silent.size == dead.size == 2  # kept: memory that is dropped is memory of a rank that left
    os.kill(os.getpid(), signal.SIGKILL)
