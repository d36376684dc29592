"""Jobs that resume from checkpoints of their own and of other layouts; started by `test_checkpoints.py`.

    checkpoints.py FOLDER [KIND...] [LAYOUT...]        no kind, no layout that resumes: all

A layout is so many partitions and replicas, split automatically or by hand. Every layout trains STEPS steps for every
kind of numbers, saves, and goes on for MORE steps: the uninterrupted run. Then every layout resumes from the saves of
its `sources`, and compares the losses of MORE steps. The jobs are forked off this process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models
from tests.counted_costs import count_costs
from tests.warm import Ranks
from weft.checkpoint.find import look

STEPS, MORE, ROWS, WIDTH = 2, 3, 8, 12
BLOCKS = 4
NUMBERS = ("fp32", "bf16", "fp16")
KINDS = (*NUMBERS, "tied", "dropout")
CONTENT = {"args": {"lr": 0.02}, "seen": (1, 2), "inf": float("inf")}


@dataclass(frozen=True)
class Layout:
    """How a job is laid out."""

    partitions: int
    replicas: int
    by_hand: bool = False

    def __str__(self) -> str:
        return f"{self.partitions}x{self.replicas}" + ("-by-hand" if self.by_hand else "")


SAVING = [Layout(partitions, replicas) for partitions in (1, 2, 3) for replicas in (1, 2)]
RESUMING = [
    *SAVING,
    *(Layout(place.partitions, place.replicas, True) for place in SAVING if place.partitions > 1),
]


READ = Layout(2, 1)
"""Whose save `read_ranges` reads."""


def chosen(all_of_them: Sequence[Any]) -> list[Any]:
    """Those that the command line names; all of them if it names none."""
    return [each for each in all_of_them if str(each) in sys.argv[2:]] or [*all_of_them]


def sources(place: Layout, kind: str) -> list[Layout]:
    """The layouts from whose saves `place` resumes.

    For every kind of numbers its own, which the same split resumes bit for bit, and another split of the same ranks
    (by hand); and one with another number of partitions or replicas, chosen so that every number of partitions,
    before and after, meets every kind.
    """
    own = Layout(place.partitions, place.replicas)
    if kind == "dropout":  # masks are drawn by units, which other splits cut otherwise
        return [] if place.by_hand else [own]
    if place.by_hand:
        return [own]
    number = KINDS.index(kind) % 3
    partitions = 1 + (place.partitions + number) % 3
    other = Layout(partitions, place.replicas if (partitions + place.partitions) % 2 else 3 - place.replicas)
    return [other] if kind == "tied" else [own, other]


class Block(models.Block):
    """A block with a buffer."""

    def __init__(self, dropout: float) -> None:
        super().__init__(WIDTH, 2 * WIDTH, torch.tanh, rate=dropout)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Net(models.Chain):
    """Blocks between two matrices, which are one if they are tied."""

    def __init__(self, dropout: float, tied: bool) -> None:
        super().__init__(BLOCKS, lambda: Block(dropout))
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


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

    def state(self) -> list[Any]:
        """What other objects than the model and the optimizer remember."""
        return [
            self.batches.next,
            self.scheduler.last_epoch,
            self.scheduler.get_last_lr(),
            self.scaler.get_scale(),
        ]

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


def start(place: Layout) -> None:
    torch.set_num_threads(1)
    count_costs()
    weft.init(
        {
            "partitions": place.partitions,
            "microbatches": 2,
            "ddp": True,
            "auto_partition": not place.by_hand,
            "default_partition": 0,
        }
    )
    clock = time.time
    time.time = lambda: clock() + 3600 * (weft.rank() - 1)  # the ranks' clocks disagree by hours


def save(folder: Path, place: Layout) -> None:
    """Trains, saves, and writes down how the uninterrupted run goes on."""
    start(place)
    for kind in chosen(KINDS):
        gc.collect()  # a model that is left over on some ranks only would take part in the others' steps
        job = Job(kind, place.by_hand, 0)
        job.train(STEPS)
        root = folder / str(place) / kind
        content = {**CONTENT, "stats": torch.arange(3.0)}
        weft.save_checkpoint(
            root, "middle", model=job.model, optimizer=job.optimizer, user_content=content, also=job.also
        )
        record = {"state": job.state(), "losses": job.train(MORE)}
        if weft.rank() == 0:
            (root / "losses.json").write_text(json.dumps(record))
        del job
    weft.shutdown()


def resume(folder: Path, place: Layout) -> None:
    """Goes on from each of its sources."""
    start(place)
    for kind in chosen(KINDS):
        for source in sources(place, kind):
            gc.collect()
            compare(folder / str(source) / kind, kind, place, source)
    weft.shutdown()


def read_ranges(folder: Path, place: Layout) -> None:
    """A rank of another layout reads all weights, as it holds all before the split, and of what the optimizer keeps its
    own part."""
    start(place)
    root = folder / str(READ) / "fp32"
    counted = {"pread": 0, "preadv": 0}

    def counting(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def count(*args: Any) -> Any:
            result = function(*args)
            counted[name] += result if name == "preadv" else len(result)
            return result

        return count

    for name in counted:
        setattr(os, name, counting(name))
    save = look(root / "middle_partial")
    assert save.index is not None
    sizes = {path: entry.size for path, entry in save.index.tensors.items()}
    for level in ("sizes", "full"):
        gc.collect()
        counted.update(pread=0, preadv=0)
        job = Job("fp32", place.by_hand, 1)
        weft.resume_from_checkpoint(root, also=job.also, verify=level)
        job.train(1)
        mine = [name for name, _ in job.model.local_named_parameters()]
        mine += [name for name, _ in job.model.local_named_buffers()]
        names = {name.removeprefix("module.") for name in mine}
        weights = {path for path in sizes if path.startswith("model/")}
        own = {path for path in sizes if path.startswith("optimizer/") and path.split("/")[1] in names}
        alone = sum(size for path, size in sizes.items() if path.startswith(("ranks/0/", "user/")))
        assert counted["preadv"] == sum(sizes[path] for path in weights | own) + alone, (counted, own)
        compared = sum(weft.allgather(counted["pread"], weft.WORLD))
        checked = sum(sizes[path] for path in weights)  # before the model is changed
        every = sum(shard.size for shard in save.index.shards.values())
        assert compared == (every if level == "full" else sum(weft.allgather(checked, weft.WORLD)))
        if place.replicas == 1:
            read = [path for paths in weft.allgather(sorted(own), weft.WORLD) for path in paths]
            assert sorted(read) == sorted(path for path in sizes if path.startswith("optimizer/"))
        if weft.rank() == 0:
            print(f"{place} reads {counted['preadv']} of {sum(sizes.values())} bytes")
        del job
    weft.shutdown()


def compare(root: Path, kind: str, place: Layout, source: Layout) -> None:
    expected = json.loads((root / "losses.json").read_text())
    job = Job(kind, place.by_hand, 1)
    torch.rand(17)
    content = weft.resume_from_checkpoint(root, model=job.model, optimizer=job.optimizer, also=job.also)
    assert torch.equal(content.pop("stats"), torch.arange(3.0)) and content == CONTENT
    assert job.state() == expected["state"], f"{root}: {job.state()} instead of {expected['state']}"
    losses = job.train(MORE)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected["losses"], strict=True))
    if weft.rank() == 0:
        print(f"{source} -> {place} {kind}: {worst}")
    limit = tolerance(kind, place, source)
    assert worst <= limit, f"{root}: {losses} instead of {expected['losses']}: {worst} > {limit}"


def tolerance(kind: str, place: Layout, source: Layout) -> float:
    """How far, relatively, losses may be from those of the uninterrupted run.

    With as many replicas as before, the same rows are multiplied, whatever the split. Other replicas have other rows in
    a microbatch, and autocast rounds the gradient of each microbatch to its format: losses then differ by up to one
    step of that format.
    """
    if place == source and kind != "tied":  # a tied weight adds gradients in the order of their arrival
        return 0.0
    if place.replicas == source.replicas or kind not in ("bf16", "fp16"):
        return 1e-6
    return torch.finfo(torch.bfloat16 if kind == "bf16" else torch.float16).eps


def main() -> None:
    folder = Path(sys.argv[1])
    resuming = chosen(RESUMING)
    needed = {source for place in resuming for kind in chosen(KINDS) for source in sources(place, kind)}
    saving = [place for place in SAVING if place in needed]
    reading = [Layout(3, 1), Layout(3, 2), Layout(1, 1)]
    if READ not in needed or "fp32" not in chosen(KINDS):
        reading = []
    for work, places in ((save, saving), (resume, resuming), (read_ranges, reading)):
        for place in places:
            job = Ranks(
                place.partitions * place.replicas,
                lambda rank, work=work, place=place: work(folder, place),
                folder / f"{work.__name__}-{place}",
            )
            job.check(120)
            print(job.text())
    print("passed")


if __name__ == "__main__":
    main()
