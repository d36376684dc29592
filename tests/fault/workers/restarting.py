"""A run that saves itself, and faults at steps of it; started by `test_restarts.py`.

    restarting.py FOLDER STEPS [--faults JSON] [--every STEPS] [--pause SECONDS] [--asynchronous]

Faults are by attempt: [[rank, step], ...]; a rank kills itself with SIGKILL in that step of that attempt. Each step
appends `step loss` to FOLDER/losses-ATTEMPT. FOLDER/process-RANK has the number of a rank's
process. The end writes a checksum of the weights to FOLDER/end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft.torch as weft


@weft.step
def train_step(model, x):
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--faults", type=json.loads, default=[])
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--asynchronous", action="store_true")
    options = parser.parse_args()
    (options.folder / f"process-{os.environ.get('RANK', '0')}").write_text(str(os.getpid()))
    attempt = int(os.environ.get("WEFT_ATTEMPT", "0"))

    weft.init({"partitions": 2, "microbatches": 2, "deterministic": True} if "RANK" in os.environ else None)
    torch.manual_seed(0)
    random.seed(0)
    layers = [nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 8)]
    model = weft.DistributedModel(nn.Sequential(*layers))
    optimizer = weft.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(torch.randn(28, 8)), batch_size=4, shuffle=True)
    fault = options.faults[attempt] if attempt < len(options.faults) else None
    also = {"scheduler": scheduler}
    with weft.checkpoints(
        options.folder / "saves", every=options.every, also=also, asynchronous=options.asynchronous
    ) as run:
        for (x,) in run.batches(loader, steps=options.steps):
            optimizer.zero_grad()
            noise = random.random() * 0.01 + torch.rand(()).item() * 0.01
            loss = train_step(model, x + noise).reduce_mean()
            optimizer.step()
            scheduler.step()
            if weft.rank() == 0:
                with open(options.folder / f"losses-{attempt}", "a") as file:
                    file.write(f"{run.step} {loss.item().hex()}\n")
            if fault == [weft.rank(), run.step]:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.pause)
    weights = model.state_dict(gather_to_rank0=True)
    if weft.rank() == 0:
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(weights[name].numpy().tobytes())
        (options.folder / "end").write_text(digest.hexdigest())


if __name__ == "__main__":
    main()
