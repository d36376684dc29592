"""Checkpoints of one process: what is saved comes back, and what was altered, forged or half written does not."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import weft.torch as weft
from weft.checkpoint.find import faults, in_order, look
from weft.checkpoint.folder import Lock
from weft.errors import CheckpointError, UsageError

from .training import assert_equal, made, saved, train, values

pytestmark = pytest.mark.usefixtures("job")

OLD = Path(__file__).parents[3] / "data" / "checkpoints"


def resign(folder: Path) -> None:
    """Lets DONE vouch for an index that was altered."""
    content = (folder / "index.json").read_bytes()
    done = {"index_bytes": len(content), "index_sha256": hashlib.sha256(content).hexdigest()}
    (folder / "DONE").write_text(json.dumps(done))


def flip(path: Path, at: int) -> None:
    """Alters one byte in place, as rewriting whole files is slow; doing it again brings the byte back."""
    with path.open("r+b") as file:
        file.seek(at)
        (before,) = file.read(1)
        file.seek(at)
        file.write(bytes([before ^ (1 << at % 8)]))


# --- there and back -------------------------------------------------------------------------------------------


CONTENT = {
    "plain": [1, 2.5, "text", None, True, float("inf")],
    "nested": {"tuple": (1, (2, 3)), 5: "key", "set": {1, 2}, "bytes": b"\0\xff"},
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    "view": torch.arange(10)[::3],
    "numpy": np.arange(6, dtype=np.int32).reshape(2, 3),
    "scalar": np.float64(2.5),
    "args": argparse.Namespace(lr=0.1, layers=[1, 2]),
    "dtype": torch.float16,
    "empty": {},
    "$like": 1,
}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("partial", [True, False])
def test_the_users_content_comes_back(tmp_path, partial):
    model, _ = made()
    weft.save_checkpoint(tmp_path, "a", partial, model=model, user_content=CONTENT)
    assert same(weft.resume_from_checkpoint(tmp_path, partial=partial, model=model), CONTENT)


def test_a_full_file_is_plain_torchs(tmp_path):
    model, optimizer = made()
    expected = values(model)
    weft.save_checkpoint(tmp_path, "final", False, model=model, user_content={"step": 3})
    content = torch.load(tmp_path / "final", weights_only=True)
    nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).load_state_dict(content)
    assert torch.load(tmp_path / "user_content_final", weights_only=True) == {"step": 3}
    train(model, optimizer)
    assert weft.resume_from_checkpoint(tmp_path, partial=False) == {"step": 3}
    assert_equal(model, expected)


def test_what_cannot_be_saved_is_listed(tmp_path):
    model, _ = made()
    bad = {"a": object(), "b": [1, lambda: 0]}
    with pytest.raises(
        UsageError, match=r"user_content\['a'\] is a builtins.object; user_content\['b'\]\[1\] is a"
    ):
        weft.save_checkpoint(tmp_path, "a", model=model, user_content=bad)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"also\['x'\] is a int"):
        weft.save_checkpoint(tmp_path, "a", model=model, also={"x": 1})
    with pytest.raises(UsageError, match="the tag is '../a'"):
        weft.save_checkpoint(tmp_path, "../a", model=model)
    with pytest.raises(UsageError, match="num_kept_partial_checkpoints is 0"):
        weft.save_checkpoint(tmp_path, "a", model=model, num_kept_partial_checkpoints=0)


def test_pickled_objects_need_leave_on_both_sides(tmp_path):
    model, _ = made()
    weft.save_checkpoint(tmp_path, "a", model=model, user_content=[1 + 2j], allow_pickle=True)
    with pytest.raises(CheckpointError, match="pass allow_pickle=True if you trust"):
        weft.resume_from_checkpoint(tmp_path, model=model)
    assert weft.resume_from_checkpoint(tmp_path, model=model, allow_pickle=True) == [1 + 2j]


def test_only_so_many_are_kept_and_a_tag_may_be_used_again(tmp_path):
    model, optimizer = made()
    for tag in ("a", "b", "c", "c"):
        weft.save_checkpoint(tmp_path, tag, model=model, num_kept_partial_checkpoints=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "b_partial", "c_partial-2", "newest"]
    assert (tmp_path / "newest").read_text() == "c\n"
    weft.resume_from_checkpoint(tmp_path, "c", model=model)


def test_a_model_that_does_not_fit_changes_nothing(tmp_path):
    saved(tmp_path, "a")
    torch.manual_seed(1)
    other = weft.DistributedModel(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4)))
    before = values(other)
    with pytest.raises(
        UsageError, match=r"0.weight has the shape \[5, 4\], the model needs \[6, 4\].*3.weight is missing"
    ):
        weft.resume_from_checkpoint(tmp_path, model=other)
    assert_equal(other, before)


def test_asynchronous_saves_hold_the_values_of_their_call(tmp_path, monkeypatch):
    model, optimizer = made()
    expected = values(model)
    pending = weft.save_checkpoint(tmp_path, "a", model=model, optimizer=optimizer, asynchronous=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = pending.wait()
    assert report.written_bytes > 0 and report.blocked_s <= report.total_s
    weft.resume_from_checkpoint(tmp_path, model=model)
    assert_equal(model, expected)

    def full(phase):
        if phase == "index":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("weft.torch.checkpoint.save.reached", full)
    weft.save_checkpoint(tmp_path, "b", model=model, asynchronous=True)
    with pytest.raises(
        CheckpointError, match=r"b was not saved: the disk of .* is full .*Earlier checkpoints in"
    ):
        weft.finish_checkpoint()
    assert weft.finish_checkpoint() is None
    weft.resume_from_checkpoint(tmp_path, "a", model=model)


def test_one_asynchronous_save_at_a_time_on_a_slow_disk(tmp_path, monkeypatch):
    model, _ = made()
    events, disk = [], threading.Event()

    def slow(phase):
        events.append((phase, threading.current_thread() is threading.main_thread()))
        if phase == "write" and not disk.is_set():
            disk.wait(0.3)  # until the second save has had the time to overtake the first
            disk.set()

    monkeypatch.setattr("weft.torch.checkpoint.save.reached", slow)
    first = weft.save_checkpoint(tmp_path, "a", model=model, asynchronous=True)
    second = weft.save_checkpoint(tmp_path, "b", model=model, asynchronous=True)
    assert first.done and disk.is_set()
    stages = [number for number, event in enumerate(events) if event == ("stage", True)]
    assert ("newest", False) in events[stages[0] : stages[1]], "the second began before the first had ended"
    second.wait()
    assert [save.tag for save in in_order(tmp_path, None)] == ["b", "a"]


def test_clocks_do_not_decide_which_save_is_the_newest(tmp_path, monkeypatch):
    model, optimizer = made()
    for number, tag in enumerate("abc"):
        monkeypatch.setattr(time, "time", lambda past=1e9 - 1e6 * number: past)
        weft.save_checkpoint(tmp_path, tag, model=model, user_content=number, num_kept_partial_checkpoints=2)
        for path in (tmp_path / f"{tag}_partial", *(tmp_path / f"{tag}_partial").iterdir()):
            os.utime(path, (1e9 - 1e6 * number,) * 2)
    (tmp_path / "newest").unlink()
    assert [save.tag for save in in_order(tmp_path, None)] == ["c", "b"]
    assert weft.resume_from_checkpoint(tmp_path, model=model) == 2


@pytest.mark.parametrize("folder", sorted(path.name for path in OLD.iterdir() if path.is_dir()))
def test_checkpoints_of_earlier_versions_are_read(tmp_path, folder):
    shutil.copytree(OLD / folder, tmp_path / folder)
    model, optimizer = made(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    content = weft.resume_from_checkpoint(
        tmp_path / folder, model=model, optimizer=optimizer, also={"scheduler": scheduler}
    )
    assert content["steps"] == 2 and content["kind"] == ("a", 1.5)
    assert_equal(model, content["model"])
    assert [entry["step"].item() for entry in optimizer.state.values()] == [2.0] * 6


# --- what was altered -----------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found(tmp_path):
    model, _ = saved(tmp_path, "a")
    folder = tmp_path / "a_partial"
    assert look(folder).fault == "" and faults(folder, look(folder).index) == []
    for name in ("index.json", "DONE"):
        for at in range((folder / name).stat().st_size):
            flip(folder / name, at)
            assert name in look(folder).fault, (name, at)
            flip(folder / name, at)
    shard, index = folder / "rank-0000.safetensors", look(folder).index
    for at in random.Random(0).sample(range(shard.stat().st_size), 50):
        flip(shard, at)
        assert any("rank-0000.safetensors is altered" in text for text in faults(folder, index)), at
        flip(shard, at)
    assert faults(folder, index) == []


@pytest.mark.parametrize("damage", ["truncated", "altered", "missing", "link", "no index", "never completed"])
def test_the_newest_good_one_is_taken_or_offered(tmp_path, caplog, damage):
    model, _ = saved(tmp_path, "a", "b")
    shard = tmp_path / "b_partial" / "rank-0000.safetensors"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "altered":
        flip(shard, shard.stat().st_size - 1)
    elif damage == "link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    else:
        name = {"missing": shard.name, "no index": "index.json", "never completed": "DONE"}[damage]
        (shard.parent / name).unlink()
    before = values(model)
    with pytest.raises(CheckpointError, match=r"b_partial/.*resume_from_checkpoint\(path, tag='a'\)"):
        weft.resume_from_checkpoint(tmp_path, "b", model=model)
    assert_equal(model, before)
    assert weft.resume_from_checkpoint(tmp_path, model=model) == {"number": 0}
    assert "resuming from a_partial, because newer checkpoints are not whole" in caplog.text


def test_without_any_good_one_the_error_lists_all(tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        weft.resume_from_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        weft.resume_from_checkpoint(tmp_path)
    saved(tmp_path, "a")
    (tmp_path / "a_partial" / "DONE").unlink()
    with pytest.raises(
        CheckpointError, match=r"DONE is missing: this save was never completed.*no other one"
    ):
        weft.resume_from_checkpoint(tmp_path)


def test_altered_full_files_are_refused(tmp_path):
    model, _ = made()
    for tag in ("a", "b"):
        weft.save_checkpoint(tmp_path, tag, False, model=model)
    flip(tmp_path / "b", 500)
    with pytest.raises(CheckpointError, match=r"/b is truncated or altered.*pass tag='a'"):
        weft.resume_from_checkpoint(tmp_path, "b", False, model=model)
    weft.resume_from_checkpoint(tmp_path, partial=False, model=model)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda index: index["shards"].update({"../x": [1, 1, 1]}), "no name of a file in this folder"),
        (lambda index: first(index).__setitem__(3, -8), "not negative"),
        (lambda index: first(index).__setitem__(3, 1 << 60), "does not lie inside"),
        (lambda index: first(index).__setitem__(2, [1 << 40]), "has 4398046511104 bytes"),
        (lambda index: first(index).__setitem__(1, "object"), "expected one of float64"),
        (lambda index: first(index).__setitem__(0, "/etc/passwd"), "one of the shards"),
        (lambda index: index["tensors"].update({"model/copy": first(index)}), "is next"),
        (lambda index: index.update(version=9), "reads version 1"),
    ],
)
def test_forged_indexes_are_refused(tmp_path, change, message):
    saved(tmp_path, "a")
    folder = tmp_path / "a_partial"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    resign(folder)
    with pytest.raises(CheckpointError, match=message):
        weft.resume_from_checkpoint(tmp_path)


def first(index):
    return next(entry for path, entry in index["tensors"].items() if entry[1] == "float32")


def test_two_jobs_do_not_write_into_one_place(tmp_path):
    model, _ = made()
    other = Lock(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"is written by another job \(process \d+ on .*a path of its own"
    ):
        weft.save_checkpoint(tmp_path, "a", model=model)
    other.close()
    (tmp_path / ".saving-old-1234").mkdir()
    weft.save_checkpoint(tmp_path, "a", model=model)
    assert not list(tmp_path.glob(".saving*"))
