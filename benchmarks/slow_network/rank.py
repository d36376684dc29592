"""One rank: PyTorch's DDP trains, and its communication hook is the contender."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.choice import choose
from weft.reduce.collective import Work
from weft.reduce.compression import make

HOSTS = ["a", "a", "b", "b"]
INT8 = 1 + 4 / 256
# How many times the gradients' bytes a host sends: a ring over four ranks passes each border 1.5 times.
CONTENDERS = {
    "no sum": 0.0,
    "ddp": 1.5,
    "ddp fp16": 0.75,
    "weft direct": 1.5,
    "weft hierarchical": 1.0,
    "weft hierarchical fp16": 0.5,
    "weft hierarchical int8": 0.25 * INT8,
}


def hook(name: str) -> Callable[[Any, Any], Any] | None:
    """DDP's communication hook for a contender; None is DDP's own sum."""
    if name in ("no sum", "ddp"):
        return None
    if name == "ddp fp16":
        return lambda state, bucket: fp16_compress_hook(None, bucket)
    _, algorithm, *spec = name.split()
    lane = AllReduceQueue(choose(dist.group.WORLD, algorithm, hosts=HOSTS), make(spec[0]) if spec else None)
    thread = ThreadPoolExecutor(1)

    def wait(work: Work, flat: torch.Tensor, future: torch.futures.Future[torch.Tensor]) -> None:
        try:
            work.wait()
            future.set_result(flat)
        except BaseException as error:
            future.set_exception(error)

    def launch(state, bucket):  # DDP refuses annotations that are texts
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        flat = bucket.buffer()
        if lane.scale != 1.0:
            flat.mul_(lane.scale)
        thread.submit(wait, lane.launch(bucket.index(), flat), flat, future)
        return future

    return launch


def sent_bytes() -> int:
    return int(Path("/sys/class/net/slow/statistics/tx_bytes").read_text())


def main(rank: int, address: str, steps: int, contenders: str, width: int, batch: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(HOSTS))
    for name in contenders.split(","):
        torch.manual_seed(0)
        layers = [nn.Linear(width, width, bias=False) for _ in range(12)]
        model = DistributedDataParallel(nn.Sequential(*layers))
        chosen = hook(name)
        if chosen is not None:
            model.register_comm_hook(None, chosen)
        inputs = torch.randn(batch, width)
        for step in range(steps + 2):
            dist.barrier()
            begin, before = time.perf_counter(), sent_bytes()
            with model.no_sync() if name == "no sum" else contextlib.nullcontext():
                model(inputs).square().mean().backward()
            took = time.perf_counter() - begin
            dist.barrier()
            line = {"contender": name, "rank": rank, "step_s": took, "sent_bytes": sent_bytes() - before}
            if step >= 2:
                print(json.dumps({**line, "parameters": 12 * width * width}), flush=True)
        del model
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
