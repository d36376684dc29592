"""A job that resumes from checkpoints of other layouts and saves its own; started by `test_checkpoints.py`.

    checkpoints.py FOLDER NAME --partitions 2 [--from NAME ...] [--by-hand]

For every kind of numbers: trains STEPS steps, saves, goes on for MORE steps (the uninterrupted run), then
resumes from those in `--from` (all of them for one kind, the first for the others; without any from its own save), and
compares the losses of MORE steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft

STEPS, MORE, ROWS, WIDTH = 2, 2, 8, 12
KINDS = ("tied", "bf16", "fp16", "dropout")
BLOCKS = 4


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.outer(torch.tanh(self.inner(self.norm(x))))) * self.scale


class Net(nn.Module):
    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Batches:
    """The data, and where in it the job is."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(5)
        self.data = torch.randn(STEPS + MORE, 2, ROWS, WIDTH, generator=numbers)
        self.next = 0

    def draw(self) -> tuple[Tensor, Tensor]:
        x, y = self.data[self.next]
        self.next += 1
        here, count = weft.dp_rank(), weft.dp_size()
        return x.chunk(count)[here], y.chunk(count)[here]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.next = content["next"]


class Job:
    """A model and all that trains it."""

    def __init__(self, kind: str, by_hand: bool, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net(0.2 if kind == "dropout" else 0.0, tied=kind == "tied")
        if by_hand:
            for number, block in enumerate(net.blocks):
                weft.set_partition(block, min(number, weft.pp_size() - 1))
        self.model = weft.DistributedModel(net)
        self.optimizer = weft.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.02, eps=1e-3)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=kind == "fp16")
        self.batches = Batches()
        self.also = {"scheduler": self.scheduler, "scaler": self.scaler, "batches": self.batches}
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)
        self.context = torch.autocast("cpu", dtype) if dtype else nullcontext()
        self.function = weft.step(self._step)

    def _step(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x).float(), y)
        model.backward(self.scaler.scale(loss))
        return loss

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            with self.context:
                loss = self.function(self.model, *self.batches.draw()).reduce_mean().detach()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            if weft.dp_size() > 1:
                dist.all_reduce(loss, group=weft.get_rdp_process_group())
                loss /= weft.dp_size()
            losses.append(loss.item())
        return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--from", nargs="*", default=[], dest="others")
    parser.add_argument("--by-hand", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    weft.init(
        {
            "partitions": given.partitions,
            "microbatches": 2,
            "ddp": True,
            "auto_partition": not given.by_hand,
            "default_partition": 0,
        }
    )
    clock = time.time
    time.time = lambda: clock() + 3600 * (weft.rank() - 1)  # the ranks' clocks disagree by hours
    for kind in KINDS:
        gc.collect()
        job = Job(kind, given.by_hand, 0)
        job.train(STEPS)
        root = given.folder / given.name / kind
        content = {"args": {"lr": 0.02}, "seen": (1, 2), "stats": torch.arange(3.0), "inf": float("inf")}
        weft.save_checkpoint(
            root, "middle", model=job.model, optimizer=job.optimizer, user_content=content, also=job.also
        )
        record = {"losses": job.train(MORE), "replicas": weft.dp_size(), "split": weft.pp_size() > 1}
        if weft.rank() == 0:
            (root / "losses.json").write_text(json.dumps(record))
        del job
        others = given.others if kind == "tied" else given.others[:1]
        for other in [*([] if others else [given.name]), *others]:
            gc.collect()  # a model that is left over on some ranks only would take part in their steps
            compare(given.folder / other / kind, kind, given, given.name in (other, f"{other} again"))
    print("passed", flush=True)


def compare(root: Path, kind: str, given: argparse.Namespace, same: bool) -> None:
    expected = json.loads((root / "losses.json").read_text())
    job = Job(kind, given.by_hand, 1)
    torch.rand(17)
    content = weft.resume_from_checkpoint(root, model=job.model, optimizer=job.optimizer, also=job.also)
    assert content["args"] == {"lr": 0.02} and content["seen"] == (1, 2) and content["inf"] == float("inf")
    assert torch.equal(content["stats"], torch.arange(3.0))
    losses = job.train(MORE)
    if kind == "dropout" and not same:
        return  # masks are drawn by units, which other splits cut otherwise
    alike = (weft.dp_size(), weft.pp_size() > 1) == (expected["replicas"], expected["split"])
    if alike or kind == "tied":
        # A tied weight adds four gradients, in an order that depends on which message comes first.
        tolerance = 0.0 if same and kind != "tied" else 1e-6
    else:  # sums in half precision have another order
        tolerance = 2e-2
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True))
    assert worst <= tolerance, f"{root}: {losses} instead of {expected['losses']}: {worst} > {tolerance}"


if __name__ == "__main__":
    main()
