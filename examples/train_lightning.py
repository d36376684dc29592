"""Lightning's Trainer with a model that weft splits.

    weft run -n 2 examples/train_lightning.py

The module knows nothing of weft: its logs, its metric and the callbacks give what they give in one process.
"""

import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from parts.small_gpt import SmallGPT
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from weft.integrations.lightning import WeftStrategy

VOCABULARY, LENGTH, ROWS, BATCH = 16, 16, 256, 16


class Counter(lightning.LightningModule):
    """Learns to count: each row is a run of consecutive numbers, so the next one can be told from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = SmallGPT(VOCABULARY, blocks=2, width=32, heads=4, context=LENGTH)
        self.accuracy = MulticlassAccuracy(VOCABULARY)

    def training_step(self, batch, index):
        loss, _, _ = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        loss, logits, targets = self.loss(batch)
        self.accuracy(logits, targets)
        self.log_dict({"val_loss": loss, "accuracy": self.accuracy})

    def loss(self, batch):
        (rows,) = batch
        logits, targets = self.gpt(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
        return cross_entropy(logits, targets), logits, targets

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def rows(count: int) -> TensorDataset:
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(count))
    return TensorDataset((starts + torch.arange(LENGTH + 1)) % VOCABULARY)


def main() -> None:
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        strategy=WeftStrategy(partitions=2, microbatches=4),
        callbacks=[EarlyStopping("val_loss", patience=1)],
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Counter()
    trainer.fit(model, DataLoader(rows(ROWS), BATCH, shuffle=True), DataLoader(rows(40), BATCH))
    found = {name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()}
    trainer.print(f"after {trainer.current_epoch} epochs: {found}")
    if not found["accuracy"] > 0.5:
        raise SystemExit("it did not learn to count")


if __name__ == "__main__":
    main()
