"""Trains by accelerate, in one process or with a split model: accelerate_job.py FOLDER PARTITIONS"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from accelerate import utils  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

FOLDER, PARTITIONS, BATCH = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if PARTITIONS:
    import weft.torch as weft
    from weft.integrations.accelerate import Accelerator

    weft.init({"partitions": PARTITIONS, "microbatches": 2})
else:
    from accelerate import Accelerator


def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    return loss


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer: Any = torch.optim.AdamW(model.parameters(), 0.05)
if PARTITIONS:
    model, optimizer = weft.DistributedModel(model), weft.DistributedOptimizer(optimizer)
    train_step = weft.step(train_step)
rows = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
# accelerate steps a schedule once for each process that reads batches of its own
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * 4 // BATCH, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(rows, batch_size=BATCH), schedule
)
seen: list[Any] = []
losses: list[float] = []
saved = FOLDER / f"state-{PARTITIONS}"
for epoch in range(3):
    if epoch == 2:
        accelerator.save_state(saved)
        accelerator.wait_for_everyone()
        accelerator.load_state(saved)
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = train_step(model, x)
            loss = loss.reduce_mean() if PARTITIONS else loss
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().clone(), "mean").item())
        seen += accelerator.gather_for_metrics(x[:, 0]).tolist() if epoch == 0 else []

# the functions, as each copy gives something of its own
here, copies = accelerator.process_index, accelerator.num_processes
tensor = torch.arange(2.0 + here).reshape(1, -1)
told = [f"from {here if PARTITIONS == 0 else weft.rank()}"]
functions = [
    utils.gather(torch.tensor([float(here)])).tolist(), utils.gather_object([here, "x"]),
    utils.reduce(torch.tensor(float(here)), "sum").item(), utils.reduce(torch.tensor(float(here))).item(),
    utils.broadcast(torch.tensor(float(here)), from_process=copies - 1).item(), utils.broadcast_object_list(told),
    utils.pad_across_processes(tensor, dim=1, pad_index=-1).tolist(),
    utils.pad_across_processes({"a": tensor}, dim=-1, pad_first=True)["a"].tolist(),
    accelerator.gather_for_metrics([f"row {here}"], use_gather_object=True),
]  # fmt: skip
found = {
    "functions": functions, "place": here,
    "losses": losses, "seen": sorted(seen), "main": accelerator.is_main_process, "copies": accelerator.num_processes,
    "wrapped": type(model).__name__, "files": sorted(path.name for path in saved.iterdir()),
    "sums": {name: value.double().sum().item() for name, value in accelerator.get_state_dict(model).items()},
}  # fmt: skip
rank = os.environ.get("RANK", "0")
(FOLDER / f"{'weft' if PARTITIONS else 'plain'}-{rank}.json").write_text(json.dumps(found))
