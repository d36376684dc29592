"""Worker: rank 1 fails in its third step, where the others wait for it in NCCL; started by `test_training.py`.

failing.py PARTITIONS
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import weft.torch as weft


def main() -> None:
    weft.init({"partitions": int(sys.argv[1]), "microbatches": 4})
    torch.manual_seed(3)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = weft.DistributedModel(nn.Sequential(*layers), bucket_cap_mb=0.01)

    @weft.step
    def train_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).pow(2).mean()
        model.backward(loss)
        return loss

    def fail(*_: object) -> None:
        raise ValueError("the data are broken")

    for step in range(5):
        if (weft.rank(), step) == (1, 2):
            layers[1 if weft.pp_size() == 1 else 3].weight.register_hook(fail)
        train_step(model, torch.randn(16, 64, device="cuda"))
        if weft.rank() == 0:
            print(f"step {step} done", flush=True)


if __name__ == "__main__":
    main()
