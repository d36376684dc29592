"""Worker: a recorded training whose GPU works much longer than the host hands over; started by `test_recording.py`.

recorded.py PARTITIONS FILE

Writes the milliseconds of the GPU's own kernels in the last steps, as `torch.profiler` saw them on this rank, as JSON
into FILE with the rank's number at its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import weft.torch as weft

STEPS, PROFILED = 10, 4
"""Steps in all, and the last ones, which torch.profiler sees."""


def main() -> None:
    weft.init({"partitions": int(sys.argv[1]), "microbatches": 4})
    torch.manual_seed(3)
    model = weft.DistributedModel(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))))
    optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    @weft.step
    def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    x = torch.randn(16384, 4096, device="cuda")

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            train_step(model, x)
            optimizer.step()
        torch.cuda.synchronize()

    train(STEPS - PROFILED)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        train(PROFILED)
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    products = [event for event in kernels if "gemm" in event.name.lower() or "cutlass" in event.name.lower()]
    file = Path(f"{sys.argv[2]}{weft.rank()}")
    file.write_text(
        json.dumps(
            {
                "all_ms": sum(event.time_range.elapsed_us() for event in kernels) / 1e3,
                "products_ms": sum(event.time_range.elapsed_us() for event in products) / 1e3,
                "names": sorted({event.name[:60] for event in kernels}),
            }
        )
    )


if __name__ == "__main__":
    main()
