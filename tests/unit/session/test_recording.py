"""What a recording knows of steps that fail, of models that were split before it, and of a folder that is full."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launching import run_ranks
from weft.errors import UsageError
from weft.profiler.reading import read_recording, read_run
from weft.profiler.recorder import Recorder
from weft.session import recording
from weft.session.state import Recorded


@pytest.mark.parametrize(
    "inside", [lambda session: recording.record_step(session, lambda: (0, 0)), recording.record_preparation],
    ids=["step", "preparation"],
)  # fmt: skip
def test_the_step_after_one_that_failed_does_not_begin_with_it(tmp_path: Path, inside: Any):
    recorder = Recorder.open(tmp_path, 0, 1)
    session = SimpleNamespace(recorder=recorder, steps=0)
    with pytest.raises(ValueError, match="before it was counted"), inside(session):
        raise ValueError("before it was counted")
    between_s = time.perf_counter()
    with recording.record_step(session, lambda: (0, 0)):
        session.steps = 1
        recorder.begin_step(1)
    recorder.close()
    spans = read_recording(tmp_path).timeline.of_step(1).spans
    (step,) = (span for span in spans if span.kind == "step")
    assert recorder._step_s >= between_s and step.duration_s < 1


def test_units_that_cannot_be_told_do_not_end_the_training(monkeypatch, caplog):
    def fails(*_: Any) -> None:
        raise UsageError("rank0.facts.json cannot be written: No space left on device")

    monkeypatch.setattr(recording, "record_rank", fails)
    session = SimpleNamespace(recorded=Recorded())
    recording.record_units(session, ["a unit"])
    assert session.recorded.units == ["a unit"]
    (line,) = caplog.messages
    assert line.startswith("the recording does not have all of the run: rank0.facts.json cannot be written")


CHANGED = """
import os, sys, time, torch
from torch import nn
import weft.torch as weft

os.chdir(sys.argv[1])
weft.init({"partitions": 2})
model = weft.DistributedModel(nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())]))
optimizer = weft.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

@weft.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

def train():
    for _ in range(2):
        optimizer.zero_grad()
        train_step(model, torch.randn(8, 8))
        optimizer.step()

train()
time.sleep(0.5)
weft.init({"partitions": 2, "record": "one"})
os.chdir("/")
train()
weft.init({"partitions": 2})
train()
os.chdir(sys.argv[1])
weft.init({"partitions": 2, "record": os.path.join(sys.argv[1], "two")})
train()
weft.init({"partitions": 2, "record": "two"})
train()
"""


def test_recordings_that_begin_after_the_models_were_split(tmp_path: Path):
    run_ranks(2, CHANGED, [str(tmp_path)], warm=True).check()
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    assert [step.step for step in one.steps[0]] == [3, 4] and [step.step for step in two.steps[0]] == [
        7,
        8,
        9,
        10,
    ]
    for run in (one, two):
        assert run.warnings == () and run.complete
        for rank in run.ranks:
            facts = run.facts[rank]
            assert {unit.partition for unit in facts.units} == {0, 1}
            assert facts.joined_s < run.steps[rank][0].start_s - 0.5, "it had joined before it recorded"
    assert [unit.name for unit in one.facts[0].units] == [unit.name for unit in two.facts[0].units]
