"""Trains by Fabric, in one process or with a split model: fabric_job.py FOLDER PARTITIONS BATCH PRECISION"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

FOLDER, PARTITIONS, BATCH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
OWN = FOLDER / ("weft" if PARTITIONS else "plain")
strategy: Any = "auto"
if PARTITIONS:
    import weft.torch as weft
    from weft.integrations.fabric import WeftStrategy

    strategy = WeftStrategy(PARTITIONS, 2)


def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    fabric.backward(loss)
    return loss


if PARTITIONS:
    train_step = weft.step(train_step)
logger = CSVLogger(OWN, flush_logs_every_n_steps=1)
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision=sys.argv[4], loggers=logger)
fabric.launch()
fabric.seed_everything(0, verbose=False)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.05))
rows = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=BATCH))
losses: list[float] = []
state = {"model": model, "optimizer": optimizer, "epoch": 2}
for epoch in range(3):
    if epoch == 2:
        fabric.save(OWN / "state.ckpt", state)
        fabric.barrier()
        assert fabric.load(OWN / "state.ckpt", state) == {}
    for (x,) in loader:
        optimizer.zero_grad()
        loss = train_step(model, x)
        loss = loss.reduce_mean() if PARTITIONS else loss
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach().clone()).item())
        fabric.log("loss", losses[-1])
fabric.save(OWN / "end.ckpt", state)
fabric.barrier()
content = torch.load(OWN / "end.ckpt", weights_only=True)["model"]
sums = {name: value.double().sum().item() for name, value in content.items()}
found = {
    "losses": losses, "sums": sums, "told": fabric.broadcast(f"rank {fabric.global_rank}"),
    "seen": sorted(fabric.all_gather(x[:, 0]).flatten().tolist()),
}  # fmt: skip
(FOLDER / f"{OWN.name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
