"""One rank of `benchmarks.shared_parameters`: resident memory between steps, and its peak within one."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time

import torch
from torch import nn

import weft.torch as weft

MIB = 2**20


def status(name: str) -> float:
    """A line of ``/proc/self/status``, in MiB."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def settle() -> float:
    """Resident memory after all that is free went back to the system, from which the next peak counts."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peaks:
        peaks.write("5")
    return status("VmRSS")


class Layer(nn.Module):
    """Two products and a residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    weft.init({"partitions": 2, "microbatches": 4, "verify": "off"})
    weft.barrier()
    empty = settle()
    torch.manual_seed(0)
    model = weft.DistributedModel(nn.Sequential(*(Layer(given.width) for _ in range(given.layers))))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @weft.step
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(8, given.width)
    took, peaks, rests = [], [], []
    for _ in range(2 + given.steps):
        optimizer.zero_grad()
        rests.append(settle() - empty)
        began = time.perf_counter()
        step(model, x)
        took.append(time.perf_counter() - began)
        peaks.append(status("VmHWM") - empty)
        optimizer.step()
    if weft.rank() == 0:
        own = sum(
            p.numel() for p in nn.Sequential(*(Layer(given.width) for _ in range(given.layers))).parameters()
        )
        figures = {"whole": own * 4 / MIB / 2, "rest": max(rests[2:]), "peak": max(peaks[2:])}
        print("figures " + json.dumps({**figures, "step_ms": sorted(took[2:])[given.steps // 2] * 1e3}))


if __name__ == "__main__":
    main()
