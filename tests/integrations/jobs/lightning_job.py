"""What Lightning's Trainer gives: in one process, or with a split model. Writes a JSON file for each rank.

python lightning_job.py FOLDER PARTITIONS CASE ...
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
import torchmetrics  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

FOLDER, PARTITIONS = Path(sys.argv[1]), int(sys.argv[2])
OWN = FOLDER / ("weft" if PARTITIONS else "plain")
ROWS = 22


def strategy(**settings: Any) -> dict[str, Any]:
    if not PARTITIONS:
        return {}
    from weft.integrations.lightning import WeftStrategy

    settings |= json.loads(os.environ.get("SETTINGS", "{}"))
    return {"strategy": WeftStrategy(partitions=PARTITIONS, microbatches=2, **settings)}


class Seen(lightning.Callback):
    """The losses that callbacks see, and the order of the hooks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.hooks: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        has = any(each.grad is not None for each in module.parameters())
        self.hooks.append(f"on_before_zero_grad {'with' if self._anywhere(has) else 'without'}")

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.hooks.append("on_before_backward")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        has = any(each.grad is not None for each in module.parameters())
        self.hooks.append(f"on_after_backward {'with' if self._anywhere(has) else 'without'}")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.hooks.append("on_before_optimizer_step")

    def _anywhere(self, has: bool) -> bool:
        if not PARTITIONS:
            return has
        import weft.torch as weft

        return any(weft.allgather(has))


class Classifier(lightning.LightningModule):
    """An unchanged module: layers, metrics, logs of all kinds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)], nn.Linear(width, 3)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.val_scores = torchmetrics.MetricCollection(
            {"recall": torchmetrics.classification.MulticlassRecall(3), "seen": torchmetrics.SumMetric()}
        )
        self.confusion = torchmetrics.classification.MulticlassConfusionMatrix(3)
        self.counts: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, index: int) -> dict[str, Any]:
        x, labels = batch
        scores = self(x)
        loss = cross_entropy(scores, labels)
        self.log("loss", loss, on_epoch=True, on_step=True)
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", scores.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("accuracy_of_batch", self.accuracy(scores, labels), on_step=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores.detach(), "index": index}

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        x, labels = batch
        scores = self(x)
        self.log("val_loss", cross_entropy(scores, labels), prog_bar=True)
        self.val_scores["recall"].update(scores, labels)
        self.val_scores["seen"].update(torch.ones_like(labels, dtype=torch.float))
        self.confusion.update(scores, labels)
        self.log_dict(dict(self.val_scores.items()))

    def on_validation_epoch_end(self) -> None:
        self.counts.append(self.confusion.compute().tolist())
        self.confusion.reset()

    def test_step(self, batch: Any, index: int) -> torch.Tensor:
        x, labels = batch
        loss = cross_entropy(self(x), labels)
        self.log_dict({"test_loss": loss, "test_right": (self(x).argmax(1) == labels).float().mean()})
        return loss

    def predict_step(self, batch: Any, index: int) -> dict[str, Any]:
        scores = self(batch[0])
        return {"labels": scores.argmax(1), "scores": scores.softmax(1), "from": index}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Classifier):
    """Manual optimization: two optimizers, clipping and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, labels = batch
        first, second = self.optimizers()
        loss = cross_entropy(self(x), labels)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        first.step()
        second.step()
        self.log("loss", loss)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.AdamW(self.layers[:2].parameters(), 0.05),
            torch.optim.SGD(self.layers[2:].parameters(), 0.1),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)]


def data(batch: int = 4, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch, **options)


def trainer(name: str, callbacks: Any = (), **options: Any) -> lightning.Trainer:
    usual = {
        "max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, "log_every_n_steps": 1, "logger": False, "enable_checkpointing": False,
        "default_root_dir": OWN / name, "callbacks": list(callbacks),
    }  # fmt: skip
    return lightning.Trainer(**{**usual, **strategy(), **options})


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(metrics.items())}


def fitting() -> Any:
    """Clipping, accumulation, schedules, logs, metrics, callbacks, a checkpoint, and going on from one."""
    torch.manual_seed(0)
    seen, module = Seen(), Classifier()
    kept = ModelCheckpoint(OWN / "fitting", monitor="val_loss", save_top_k=1, save_last=True)
    made = trainer(
        "fitting", [seen, kept, LearningRateMonitor("step"), EarlyStopping("val_loss", patience=1)], max_epochs=4,
        logger=CSVLogger(OWN / "fitting", "logs", "one"), enable_checkpointing=True, gradient_clip_val=0.5,
        accumulate_grad_batches=2, num_sanity_val_steps=2,
    )  # fmt: skip
    made.fit(module, data(shuffle=True), data(8))
    found = {
        "losses": seen.losses, "hooks": seen.hooks, "metrics": numbers(made.callback_metrics), "counts": module.counts,
        "epochs": made.current_epoch, "steps": made.global_step, "best": Path(kept.best_model_path).name,
        "files": sorted(path.name for path in (OWN / "fitting").glob("*.ckpt")),
    }  # fmt: skip
    found["test"] = [numbers(each) for each in made.test(module, data(8), ckpt_path="best", verbose=False)]
    predicted = made.predict(module, data(8))
    found["predicted"] = [
        {name: torch.as_tensor(v).tolist() for name, v in each.items()} for each in predicted
    ]
    return found


def resuming() -> Any:
    """Losses of a run that goes on from the end of its first epoch, and of one that was never interrupted."""
    losses = []
    for epochs in ((2,), (1, 2)):
        seen = Seen()
        for number, end in enumerate(epochs):
            torch.manual_seed(0)
            module = Classifier()
            made = trainer("resuming", [seen], max_epochs=end)
            path = OWN / "resuming" / "middle.ckpt"
            made.fit(module, data(), ckpt_path=path if number else None)
            made.save_checkpoint(path)
        losses.append(seen.losses)
    assert losses[0] == losses[1], losses
    return {"losses": losses[0]}


def manual() -> Any:
    torch.manual_seed(0)
    module = Manual()
    seen = Seen()
    seen.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    made = trainer("manual", [seen])
    made.fit(module, data(), data(8))
    return {"metrics": numbers(made.callback_metrics), "hooks": seen.hooks, "steps": made.global_step}


def mixed() -> Any:
    torch.manual_seed(0)
    seen = Seen()
    trainer("mixed", [seen], precision="bf16-mixed").fit(Classifier(), data())
    return {"losses": seen.losses}


class Pairs(Classifier):
    """Each row of the first half belongs to one of the second."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        scores = self.layers(batch[0])[:, 0]
        good, bad = scores.tensor_split(2)
        loss = -nn.functional.logsigmoid(good[: len(bad)] - bad).mean() + 0.1 * scores.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))


def joined() -> Any:
    torch.manual_seed(0)
    seen = Seen()
    made = trainer("joined", [seen], num_sanity_val_steps=2)
    made.fit(Pairs(), data(8), data(8))
    return {"losses": seen.losses, "metrics": numbers(made.callback_metrics)}


class Sentences(lightning.LightningModule):
    """Sentences of other lengths; the step returns something of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
        self.computed: list[int] = []
        self.returned: list[Any] = []

    def training_step(self, batch: Any, index: int) -> dict[str, Any]:
        self.computed.append(batch["words"].numel())
        scores = self.layers(batch["words"])
        loss = cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return {"loss": loss, "words": batch["words"], "scores": scores.detach()[:, 0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        assert torch.equal(outputs["words"], batch["words"])
        self.returned.append(outputs["scores"].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05)


def padded() -> Any:
    torch.manual_seed(0)
    lengths = torch.tensor([9, 2, 3, 2, 8, 2, 4, 3])
    mask = torch.arange(9) < lengths[:, None]
    words = torch.randint(1, 20, (8, 9), generator=torch.Generator().manual_seed(1)) * mask
    rows = [
        {"words": row, "mask": one, "labels": row.masked_fill(~one, -100)}
        for row, one in zip(words, mask, strict=True)
    ]
    module = Sentences()
    made = trainer("padded", **strategy(trainer_tokens="mask"))
    made.fit(module, DataLoader(rows, batch_size=4))
    assert sum(module.computed) < 0.8 * 2 * words.numel() or not PARTITIONS, module.computed
    return {"returned": module.returned, "metrics": numbers(made.callback_metrics)}


class InOrder(Classifier):
    """Reads its share in the order of the rows; the Trainer's own sampler shuffles for training."""

    def val_dataloader(self) -> Any:
        return []

    def train_dataloader(self) -> DataLoader:
        shares = getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        rows = data().dataset
        sampler = DistributedSampler(rows, shuffle=False, **shares)
        return DataLoader(rows, batch_size=4 // shares["num_replicas"], sampler=sampler, drop_last=True)


class Adversarial(InOrder):
    """Two networks that are updated one after another in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> None:
        x, labels = batch
        maker, judge = self.optimizers()
        self.toggle_optimizer(maker)
        loss = cross_entropy(self(x), labels) - self.critic(self(x)).mean()
        self.log("maker", loss)
        maker.zero_grad()
        self.manual_backward(loss)
        maker.step()
        self.untoggle_optimizer(maker)
        loss = self.critic(self(x).detach()).square().mean() + (self.critic(x[:, :3]) - 1).square().mean()
        self.log("judge", loss)
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), 0.1, momentum=0.5) for each in (self.layers, self.critic)]


def adversarial() -> Any:
    torch.manual_seed(0)
    made = trainer("adversarial")
    made.fit(Adversarial())
    return {"metrics": numbers(made.callback_metrics), "steps": made.global_step}


def replicas() -> Any:
    """Copies read every other row, so that one process reads the same rows together."""
    torch.manual_seed(0)
    module = InOrder()
    made = trainer("replicas", [], accumulate_grad_batches=2)
    made.fit(module, val_dataloaders=data(4 if PARTITIONS else 8))
    return {"metrics": numbers(made.callback_metrics), "counts": module.counts}


if __name__ == "__main__":
    found = {case: globals()[case]() for case in sys.argv[3:]}
    rank = int(__import__("os").environ.get("RANK", 0))
    OWN.mkdir(parents=True, exist_ok=True)
    (OWN / f"{rank}.json").write_text(json.dumps(found))
