"""A run that saves itself, in one process: what comes back, where it goes on, and what is refused."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import weft.torch as weft
from weft.checkpoint.find import in_order
from weft.errors import CheckpointError, UsageError

DATA = TensorDataset(torch.arange(14.0).reshape(14, 1))


@weft.step
def train_step(model, x):
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


class Job:
    """A script's job, made anew as a restart would make it."""

    def __init__(self) -> None:
        weft.shutdown()
        weft.init({})
        torch.manual_seed(0)
        random.seed(0)
        self.model = weft.DistributedModel(nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1)))
        self.optimizer = weft.DistributedOptimizer(torch.optim.Adam(self.model.parameters(), lr=1e-2))

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = train_step(self.model, x + random.random()).reduce_mean().item()
        self.optimizer.step()
        return float(loss)


class Stopped(Exception):
    """In the place of whatever ends a script."""


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, shuffle=True)


def own_generator() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def sampler_with_generator() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(4))
    return DataLoader(DATA, batch_size=4, sampler=sampler)


def by_epoch() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, 1, 0, seed=5))


def by_workers() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1)


def train(
    path: Path, make: Callable[[], Any], until: int | None = None
) -> Iterator[tuple[int, int, Any, float]]:
    """Step, epoch, batch and loss of three epochs; the script is ended in step `until`."""
    job = Job()
    with weft.checkpoints(path, every=1) as run:
        torch.rand(3)  # a script may draw numbers before its loop
        for (x,) in run.batches(make(), epochs=3):
            yield run.step, run.epoch, x.flatten().tolist(), job.step(x)
            if run.step == until:
                raise Stopped


def interrupted(path: Path, make: Callable[[], Any], until: int) -> list[Any]:
    seen = []
    with pytest.raises(Stopped):
        for each in train(path, make, until):
            seen.append(each)
    return seen


@pytest.mark.parametrize("make", [shuffled, own_generator, sampler_with_generator, by_epoch, by_workers])
def test_data_and_numbers_go_on(init, tmp_path: Path, make: Callable[[], Any]):
    whole = list(train(tmp_path / "whole", make))
    assert len(whole) == 12 and [epoch for _, epoch, _, _ in whole] == sorted([0, 1, 2] * 4)
    path = tmp_path / "cut"
    seen = interrupted(path, make, 6)[:-1]  # the step of the failure was not saved
    seen += interrupted(path, make, 10)[:-1]
    assert seen + list(train(path, make)) == whole
    assert list(train(path, make)) == []


def test_a_loader_that_draws_otherwise_is_refused(init, tmp_path: Path):
    interrupted(tmp_path, own_generator, 3)
    with pytest.raises(
        UsageError, match="has 0 random generators of its own, that of the save had 1: make it"
    ):
        list(train(tmp_path, shuffled))


def test_epochs_have_different_orders(init, tmp_path: Path):
    batches = [batch for _, _, batch, _ in train(tmp_path, by_epoch)]
    assert batches[:4] != batches[4:8] and sorted(sum(batches[:4], [])) == sorted(sum(batches[4:8], []))


def steps(path: Path, total: int, every: int = 3, **more: Any) -> tuple[list[int], list[float]]:
    job = Job()
    found: list[float] = []
    with weft.checkpoints(path, every, **more) as run:
        numbers = []
        for step in run.steps(total):
            numbers.append(step)
            found.append(job.step(torch.rand(4, 1)))
    return numbers, found


def test_steps_are_numbered_through(init, tmp_path: Path):
    numbers, whole = steps(tmp_path / "whole", 8)
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 8]
    _, first = steps(tmp_path / "cut", 4)
    numbers, rest = steps(tmp_path / "cut", 8)
    assert numbers == [5, 6, 7, 8] and first + rest == whole
    assert [save.tag for save in in_order(tmp_path / "cut", None)] == ["step8", "step6"]


def test_a_loop_that_is_left_is_saved(init, tmp_path: Path):
    job = Job()
    with weft.checkpoints(tmp_path, every=100) as run:
        for _ in run.steps(50):
            job.step(torch.rand(4, 1))
            if run.step == 3:
                break
    assert [save.tag for save in in_order(tmp_path, None)] == ["step3"]


def test_a_signal_saves_and_ends_with_75(init, tmp_path: Path):
    job = Job()
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended, weft.checkpoints(tmp_path, every=100, asynchronous=True) as run:
        for step in run.steps(50):
            job.step(torch.rand(4, 1))
            if step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert ended.value.code == 75
    assert [save.tag for save in in_order(tmp_path, None)] == ["step4"]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_saves_that_are_all_cut_are_an_error(init, tmp_path: Path):
    steps(tmp_path, 5)
    for save in in_order(tmp_path, None):
        (save.folder / "DONE").unlink()
    with pytest.raises(CheckpointError, match="this save was never completed"):
        steps(tmp_path, 9)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 0}, "every is 0: write a whole number from 1 on"),
        ({"every": 2.5}, "every is 2.5: write"),
        ({"every": 2, "keep": 0}, "keep is 0: write"),
        ({"every": 2, "also": {"run": None}}, r"also\['run'\] is taken"),
    ],
)
def test_wrong_values(init, tmp_path: Path, given: dict[str, Any], text: str):
    with pytest.raises(UsageError, match=text):
        weft.checkpoints(tmp_path, **given)


def test_wrong_use(init, tmp_path: Path):
    init()
    with pytest.raises(UsageError, match="make the DistributedModel before"), weft.checkpoints(tmp_path, 1):
        pass
    model = weft.DistributedModel(nn.Linear(1, 1))
    with (
        pytest.raises(UsageError, match="pass optimizer= to weft.checkpoints"),
        weft.checkpoints(tmp_path, 1),
    ):
        pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.checkpoints(tmp_path, 1, optimizer=optimizer) as run:
        for given in ({}, {"steps": 1, "epochs": 1}):
            with pytest.raises(UsageError, match="steps= or epochs="):
                next(run.batches([1], **given))
        with pytest.raises(UsageError, match="list gave no batch"):
            next(run.batches([], steps=1))
    with pytest.raises(UsageError, match="inside of the context"):
        next(run.steps(1))


def test_a_trial_leaves_the_saves_of_the_script_alone(tmp_path, monkeypatch):
    def steps_of(total: int) -> list[int]:
        job = Job()
        with weft.checkpoints(tmp_path / "mine", every=2) as run:
            found = []
            for number in run.steps(total):
                job.step(torch.ones(2, 1))
                found.append(number)
            return found

    assert steps_of(4) == [1, 2, 3, 4]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")}
    (tmp_path / "trial").mkdir()
    monkeypatch.setenv("WEFT_TRIAL", str(tmp_path / "trial"))
    assert steps_of(6) == [1, 2, 3, 4, 5, 6], "it goes on from no save"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "mine").rglob("*")} == before
    job = Job()
    with weft.checkpoints(tmp_path / "other" / "mine", every=2, model=job.model) as run:
        assert next(iter(run.steps(3))) == 1, "another folder of that name"
    monkeypatch.delenv("WEFT_TRIAL")
    assert steps_of(6) == [5, 6]
    weft.shutdown()
