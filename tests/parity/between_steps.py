"""What one rank alone loads or sets, and several optimizers of a model; started by `test_between_steps.py`.

    between_steps.py --folder FOLDER check...

Each check runs in every layout that the number of ranks allows. Every rank asserts for itself.
"""

from __future__ import annotations

import copy
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weft.torch as weft
from tests.parity.registry import Checks
from weft.errors import WeftError

CHECKS = Checks()
given = CHECKS.given
WIDTH, ROWS, STEPS = 8, 8, 3

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pipeline": {"partitions": 2},
        "copies": {},
        "tensors": {"tensor_parallel_degree": 2},
        "sequences": {"context_parallel_degree": 2},
        "shared states": {"shard_optimizer_state": True},
        "shared parameters": {"sharded_data_parallel_degree": 2},
    },
    4: {
        "pipelines": {"partitions": 2},
        "copies of tensors": {"tensor_parallel_degree": 2},
        "pipelines that share states": {"partitions": 2, "shard_optimizer_state": True},
        "pipelines that share parameters": {"partitions": 2, "sharded_data_parallel_degree": 2},
    },
}
SHARE_FROM_THE_START = ("shared states", "shared parameters")
"""Layouts in which a rank never has the whole state, which one rank alone could not give to all."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks).double()


def loss_of(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - 1).square().mean()


def batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(ROWS, 4, WIDTH, generator=numbers, dtype=torch.float64) for _ in range(2 * STEPS)]


Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Alone:
    """One process that trains, each optimizer its own half of the parameters."""

    def __init__(self, *kinds: Made) -> None:
        self.net = network()
        parameters = list(self.net.parameters())
        each = len(parameters) // len(kinds)
        self.optimizers = [made(parameters[n * each : (n + 1) * each]) for n, made in enumerate(kinds)]

    def step(self, x: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(x)
        for optimizer in self.optimizers:
            optimizer.step()

    def backward(self, x: Tensor) -> None:
        loss_of(self.net, x).backward()


class Split(Alone):
    """The same over the ranks."""

    def __init__(self, settings: Mapping[str, Any], *kinds: Made) -> None:
        gc.collect()
        weft.init({"microbatches": 2, "ddp": True, **settings})
        self.model = weft.DistributedModel(network())
        self.scaler = weft.amp.GradScaler("cpu", init_scale=4.0)
        parameters = list(self.model.parameters())
        each = len(parameters) // len(kinds)
        self.optimizers = [
            weft.DistributedOptimizer(made(parameters[n * each : (n + 1) * each]))
            for n, made in enumerate(kinds)
        ]

        @weft.step
        def train(model: Any, x: Tensor) -> None:
            model.backward(loss_of(model, x))

        self.train = train

    def backward(self, x: Tensor) -> None:
        self.train(self.model, x.tensor_split(weft.rdp_size())[weft.rdp_rank()])

    def compare(self, alone: Alone, what: str) -> None:
        for name, value in self.model.state_dict().items():
            difference = float((value - alone.net.state_dict()[name]).abs().max())
            assert difference < 1e-12, f"{what}: {name} differs by {difference}"


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, settings in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        yield name, settings
        weft.shutdown()


# --- before the first step: what the first rank has goes to all -------------------------------------------------


def trained() -> Alone:
    alone = Alone(adam, momentum)
    for x in batches()[:STEPS]:
        alone.step(x)
    return alone


def load_weights(job: Any, alone: Alone) -> None:
    job.model.load_state_dict(copy.deepcopy(alone.net.state_dict()))


def load_states(job: Any, alone: Alone) -> None:
    for mine, other in zip(job.optimizers, alone.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))


def set_rate(job: Any, alone: Alone) -> None:
    job.optimizers[1].param_groups[0]["lr"] = 0.003


BEFORE = {"weights": load_weights, "states": load_states, "rate": set_rate}


@CHECKS.of_each(*BEFORE)
def before_the_first_step(what: str) -> None:
    """One rank alone loads or sets it; ranks train as one process that has loaded it."""
    for layout, settings in layouts():
        if layout in SHARE_FROM_THE_START and what != "rate":
            continue
        source, alone, job = trained(), Alone(adam, momentum), Split(settings, adam, momentum)
        if what == "weights":
            alone.net.load_state_dict(source.net.state_dict())
        elif what == "states":
            load_states(alone, source)
        else:
            set_rate(alone, source)
        if weft.rank() == 0:
            BEFORE[what](job, source)
        for x in batches()[STEPS:]:
            alone.step(x)
            job.step(x)
        job.compare(alone, f"{what} in {layout}")


@CHECKS.check
def a_scale_before_the_first_step() -> None:
    for layout, settings in layouts():
        job = Split(settings, adam)
        if weft.rank() == 0:
            job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": 1024.0})
        job.step(batches()[0])
        assert job.scaler.get_scale() == 1024.0, layout


# --- after it: a difference ends the job with an error that names it ----------------------------------------------


def set_betas(job: Any) -> None:
    job.optimizers[0].param_groups[0]["betas"] = (0.5, 0.9)


def load_scheduler(job: Any) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizers[0], lambda step: 1 / (1 + step))
    scheduler.step()


def load_scale(job: Any) -> None:
    job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": 1024.0})


def write_weights(job: Any) -> None:
    with torch.no_grad():
        next(job.model.local_parameters()).mul_(2)


AFTER: dict[str, tuple[Callable[[Any], None], str]] = {
    "weights": (lambda job: load_weights(job, trained()), "the number of states loaded into the model"),
    "states": (lambda job: load_states(job, trained()), "the number of states loaded into the optimizer 0"),
    "rate": (lambda job: set_rate(job, trained()), "lr of the optimizer 1 is 0.003 on rank 0"),
    "betas": (set_betas, "betas of the optimizer 0 is (0.5, 0.9) on rank 0"),
    "scheduler": (load_scheduler, "lr of the optimizer 0 is 0.005 on rank 0"),
    "scale": (load_scale, "the scale of the scaler is 1024.0 on rank 0"),
    "written": (write_weights, "the ranks have other weights, which the script wrote between steps"),
}


@CHECKS.of_each(*AFTER)
def after_a_step(what: str) -> None:
    """One rank alone loads or sets it: the next step names it, on one rank at least, and ends on all."""
    change, text = AFTER[what]
    for layout, settings in layouts():
        alike = layout in ("copies", "sequences", "shared states")
        if what == "written" and not alike:
            continue  # no other rank has the same weights
        if what in ("weights", "states") and "share" in layout:
            continue  # loading is something that all do together there
        job = Split(settings, adam, momentum)
        first, second, *_ = batches()
        job.step(first)
        if weft.rank() == 0:
            change(job)
        told = ""
        try:
            job.step(second)
        except WeftError as error:
            told = str(error)
        assert told, f"{what} in {layout}: no rank says anything"
        assert text in told or "rank" in told, f"{what} in {layout}: {told}"
        texts = weft.allgather(told)
        assert any(text in each for each in texts), f"{what} in {layout}: {texts}"


@CHECKS.of_each(*AFTER)
def ends_the_job(what: str) -> None:
    """The same with copies of a pipeline, none of whose ranks catches the error."""
    job = Split(LAYOUTS[4]["pipelines"], adam, momentum)
    first, second, *_ = batches()
    job.step(first)
    if weft.rank() in (1, 3) and what != "written" or weft.rank() == 3:
        AFTER[what][0](job)
    job.step(second)


@CHECKS.check
def alike_on_all_ranks_is_no_fault() -> None:
    for layout, settings in layouts():
        job, alone = Split(settings, adam, momentum), Alone(adam, momentum)
        for number, x in enumerate(batches()):
            for each in (job, alone):
                each.step(x)
                set_rate(each, alone)
                if number == 1:
                    load_states(each, trained())
                if number == 2 and "share" not in layout:
                    each.net.load_state_dict(trained().net.state_dict()) if each is alone else load_weights(
                        each, trained()
                    )
        job.compare(alone, layout)


# --- several optimizers -------------------------------------------------------------------------------------------


@CHECKS.check
def several_optimizers_come_back() -> None:
    """From `weft.checkpoints`, in this layout and in one process."""
    folder = Path(given.folder) / "several"
    alone = Alone(adam, momentum)
    for x in batches():
        alone.step(x)
    for layout, settings in layouts():
        for steps in (STEPS, 2 * STEPS):
            job = Split(settings, adam, momentum)
            if steps == STEPS and weft.rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            weft.barrier()
            with weft.checkpoints(folder, every=STEPS) as run:
                for number in run.steps(steps):
                    job.step(batches()[number - 1])
            if steps == STEPS:
                weft.shutdown()
        job.compare(alone, layout)


@CHECKS.check
def several_optimizers_go_to_other_layouts() -> None:
    """Saved in each layout, resumed in the next one."""
    alone = Alone(momentum, adam)
    for x in batches():
        alone.step(x)
    found = [*LAYOUTS[int(os.environ["WORLD_SIZE"])].items()]
    for (before, first), (after, second) in zip(found, [*found[1:], found[0]], strict=True):
        folder = Path(given.folder) / before.replace(" ", "-")
        job = Split(first, momentum, adam)
        for x in batches()[:STEPS]:
            job.step(x)
        weft.save_checkpoint(folder, "a", model=job.model, optimizer=job.optimizers)
        weft.shutdown()
        job = Split(second, momentum, adam)
        weft.resume_from_checkpoint(folder, "a")
        for x in batches()[STEPS:]:
            job.step(x)
        job.compare(alone, f"from {before} to {after}")
        weft.shutdown()


if __name__ == "__main__":
    CHECKS.run(sys.argv[1:], lambda: None)
