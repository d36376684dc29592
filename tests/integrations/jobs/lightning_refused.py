"""Modules and Trainers that ask for what a split model cannot do: python lightning_refused.py CASE"""

from __future__ import annotations

import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
import torchmetrics  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from weft.integrations.lightning import WeftStrategy  # noqa: E402

CASE = sys.argv[1]


class Own:
    def __init__(self, rows: Any) -> None:
        self.rows = torch.stack(rows)


class Plain(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.mean = torchmetrics.MeanMetric()
        self.automatic_optimization = CASE not in ("twice", "closure", "toggle")

    def training_step(self, batch: Any, index: int) -> Any:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        loss = self.layers(x).square().mean()
        if CASE == "nothing":
            return None
        if CASE == "logger":
            self.logger.experiment.log_metrics({"loss": loss})
        if CASE == "compute":
            self.mean(loss)
            self.log("mean", self.mean.compute())
        if CASE == "value":
            return loss + self.mean(loss)
        if CASE == "sometimes" and x.sum() > self.total:
            self.log("rare", loss)
        if CASE == "toggle":
            self.toggle_optimizer(self.optimizers())
        if CASE == "closure":
            self.optimizers().step(lambda: self.manual_backward(loss))
        if CASE == "twice":
            for _ in range(2):
                self.manual_backward(self.layers(x).square().mean())
                self.optimizers().step()
        return loss

    total = -1.0

    def configure_optimizers(self) -> Any:
        kind = torch.optim.LBFGS if CASE == "lbfgs" else torch.optim.SGD
        return kind(self.parameters(), 0.1)


if CASE == "backward":
    Plain.backward = lambda self, loss: loss.backward()  # type: ignore[method-assign]
if CASE == "iterator":

    def training_step(self: Any, dataloader_iter: Any) -> Any:
        return self.layers(next(dataloader_iter)[0]).square().mean()

    Plain.training_step = training_step  # type: ignore[method-assign]

torch.manual_seed(0)
rows: Any = list(torch.arange(32.0).reshape(8, 4))
collate: Any = None
if CASE == "sometimes":
    Plain.total = 30.0  # what the second half of the first batch exceeds
if CASE == "texts":
    rows = [(row, "a text") for row in rows]
if CASE == "object":
    collate = Own
if CASE == "batches":
    from weft.launch.discovery import discover

    rows = [row + discover(__import__("os").environ).rank for row in rows]
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, num_sanity_val_steps=0, default_root_dir="/nonexistent",
    logger=CSVLogger("/nonexistent") if CASE == "logger" else False,
    precision="64-true" if CASE == "precision" else None,
    strategy=WeftStrategy(partitions=3 if CASE == "processes" else 2, microbatches=2),
)  # fmt: skip
trainer.fit(Plain(), DataLoader(rows, batch_size=4, collate_fn=collate))
