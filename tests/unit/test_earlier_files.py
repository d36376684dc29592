"""Files that earlier versions wrote are read as they were meant; ``tests/data/version-1`` says how each was made."""

from __future__ import annotations

import argparse
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import weft.torch as weft
from tests.unit.torch.checkpoint.training import assert_equal, made
from weft.checkpoint.find import look
from weft.errors import CheckpointError
from weft.graph import Graph
from weft.profiler.reading import read_recording
from weft.schedule import make
from weft.schedule.file import from_csv
from weft.timeline import Timeline
from weft.torch.checkpoint.export import read_model
from weft.torch.checkpoint.restore import model_names
from weft.torch.placed.plan import Plan

FILES = Path(__file__).parents[1] / "data" / "version-1"

NAN, INF = float("nan"), float("inf")
USER = {
    "plain": [1, 2.5, "text", None, True],
    "$dict": {5: "key", (1, "b"): None, "$like": 1},
    "$tuple": (1, (2, [3])),
    "$set": {1, 2},
    "$float": [NAN, INF, -INF],
    "$int": [2**63 - 1, -(2**63), 2**64, -(2**200)],
    "$bytes": b"\0\xff",
    "$namespace": argparse.Namespace(lr=0.1, layers=(1, 2)),
    "$dtype": torch.bfloat16,
    "$device": torch.device("cuda", 1),
    "$tensor": [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), torch.tensor(1 + 2j), torch.arange(10)[::3],
        torch.tensor(3.0), torch.empty(0, 2, dtype=torch.float16), torch.tensor([True, False]),
    ],
    "$numpy": [
        numpy.arange(6, dtype=numpy.int32).reshape(2, 3), numpy.array([1 + 2j, 3]), numpy.zeros((0, 2), ">f8"),
        numpy.array(7),
    ],
    "$scalar": [numpy.float64(2.5), numpy.bool_(True), numpy.int8(-3)],
    "ordered": {"b": 1, "a": 2},
    "size": (2, 3),
    "frozen": {3},
    "bytearray": b"ab",
}  # fmt: skip
"""What the files hold beside the model, as it comes back: an ``OrderedDict`` as a dict, a ``torch.Size`` as a tuple."""

FIRST_AVERAGES = [0.007559562101960182, -0.002626989269629121, 0.002036615740507841, -0.008033906109631062]
"""Of Adam, for the first row of the first weight."""


@pytest.fixture
def job():
    weft.init({})
    yield
    weft.shutdown()


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    assert type(found) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted), path
    elif isinstance(wanted, (numpy.ndarray, numpy.generic)):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape and (found == wanted).all(), path
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), path
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}[{number}]")
    elif isinstance(wanted, float) and math.isnan(wanted):
        assert math.isnan(found), path
    else:
        assert found == wanted, path


def test_a_partial_checkpoint_of_two_ranks(tmp_path, job):
    shutil.copytree(FILES / "checkpoints", tmp_path / "old")
    model, optimizer = made(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)
    wanted = {"model": model, "optimizer": optimizer, "also": {"scheduler": scheduler}}
    with pytest.raises(CheckpointError, match="this checkpoint holds a pickled object"):
        weft.resume_from_checkpoint(tmp_path / "old", **wanted)
    user = weft.resume_from_checkpoint(tmp_path / "old", allow_pickle=True, **wanted)
    assert_equal(model, user.pop("model"))
    assert user.pop("$pickle") == [1 + 2j, range(3)]
    assert_same(user, USER)
    assert [entry["step"].item() for entry in optimizer.state.values()] == [2.0] * 6
    first = optimizer.state[model.module[0].weight]["exp_avg"]
    assert first[0].tolist() == pytest.approx(FIRST_AVERAGES, rel=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (scheduler.step_size, scheduler.gamma) == (2, 0.5)


def test_the_pickled_object_is_left_out_when_asked_for(tmp_path, job):
    shutil.copytree(FILES / "checkpoints", tmp_path / "old")
    model, _ = made(1)
    user = weft.resume_from_checkpoint(tmp_path / "old", model=model, allow_pickle="leave")
    assert (
        repr(user["$pickle"])
        == "[<a pickled object that was not read>, <a pickled object that was not read>]"
    )


def test_the_split_of_a_partial_checkpoint():
    index = look(FILES / "checkpoints" / "both_partial").index
    assert index is not None
    assert list(model_names(index))[:2] == ["0.weight", "0.bias"]
    plan = Plan.from_json(index.content["model"]["plan"])
    plan.check(2)
    assert [(unit.name, unit.partition) for unit in plan.units] == [("0", 0), ("1", 0), ("2", 1)]
    assert index.content["layout"] == {"world": 2, "partitions": 2, "placement": "cluster"}


def test_a_full_checkpoint(tmp_path, job):
    shutil.copytree(FILES / "full", tmp_path / "old")
    model, _ = made(1)
    user = weft.resume_from_checkpoint(tmp_path / "old", "whole", partial=False, model=model)
    assert_equal(model, user["model"])
    assert_equal(model, read_model(FILES / "checkpoints"))
    del user["model"]
    assert_same(user, USER)


def test_a_recording_of_two_ranks():
    found = read_recording(FILES / "recording")
    assert found.warnings == ()
    drawn = Timeline.from_json(
        (FILES / "recording.timeline.json").read_text()
    )  # which did not know peers yet
    assert Timeline(replace(span, peer=-1) for span in found.timeline.spans) == drawn
    assert {span.rank for span in found.timeline.spans} == {0, 1}
    assert {"step", "F", "B", "send", "recv", "wait"} <= {span.kind for span in found.timeline.spans}


def test_a_timeline():
    timeline = Timeline.from_json((FILES / "step.timeline.json").read_text())
    ran = [(span.rank, span.kind, span.microbatch) for span in timeline.spans if span.rank == 1]
    assert ran == [(1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1)]
    assert timeline.spans[0].end_s == 0.000820209999801591


def test_a_graph():
    graph = Graph.from_json((FILES / "model.graph.json").read_text())
    assert [(unit.name, unit.parameter_bytes, unit.output_bytes) for unit in graph] == [
        ("body.0", 160, 128), ("body.2", 144, 64), ("head", 40, 32),
    ]  # fmt: skip
    assert next(iter(graph)).forward_ms == 0.06788531970187282
    assert [tensor.bytes for tensor in graph.tensors] == [128, 64]


@pytest.mark.parametrize("name", ["schedule.csv", "schedule-with-transfers.csv"])
def test_a_schedule(name):
    found, wanted = from_csv((FILES / name).read_text()), make("1f1b", 2, 3)
    assert (found.ranks, found.rank_of_stage) == (wanted.ranks, wanted.rank_of_stage)
