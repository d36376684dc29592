"""Places where nothing can be written: an error of weft's that names the file, and nothing half is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

import weft.torch as weft
from weft.errors import CheckpointError, UsageError
from weft.torch.session import current

from .training import made, saved

# Python 3.13 tells that a stream of torch.distributed.checkpoint, whose save has failed, is flushed when it is freed.
pytestmark = [
    pytest.mark.usefixtures("job"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FORMATS = ["torch", "safetensors", "huggingface", "distributed"]


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs more rights than this user has")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk(small_disk):
    model, optimizer = made()
    weft.save_checkpoint(small_disk, "a", model=model, optimizer=optimizer, user_content=1)
    with pytest.raises(CheckpointError, match=r"b was not saved: rank 0: the disk of .* is full"):
        weft.save_checkpoint(small_disk, "b", model=model, user_content=torch.zeros(300_000))
    with pytest.raises(CheckpointError, match=r"c was not saved: .*is full"):
        weft.save_checkpoint(small_disk, "c", False, model=model, user_content=torch.zeros(300_000))
    assert sorted(path.name for path in small_disk.iterdir()) == [".lock", "a_partial", "newest"]
    weft.save_checkpoint(small_disk, "d", model=model, user_content=2)
    assert weft.resume_from_checkpoint(small_disk, model=model) == 2


def test_a_disk_that_cannot_be_written(small_disk):
    model, _ = made()
    weft.save_checkpoint(small_disk, "a", model=model, user_content=1)
    current.session().saves.close()
    current.session().saves = None
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"b was not saved: .*let this user \(id \d+\) write there"):
        weft.save_checkpoint(small_disk, "b", model=model)
    assert weft.resume_from_checkpoint(small_disk, model=model) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_exports_to_a_full_disk(small_disk, tmp_path, format):
    saved(tmp_path / "saves", "a")
    (small_disk / "rest").write_bytes(b"0" * (256 << 10))
    with pytest.raises(CheckpointError, match=rf"{format} was not written: the disk of .* is full \(0 MiB"):
        weft.export_checkpoint(tmp_path / "saves", small_disk / format, format)
    with pytest.raises(CheckpointError, match=r"b_0_0 was not written: the disk of .* is full"):
        weft.save(torch.zeros(300_000), small_disk / "b")
    assert [path.name for path in small_disk.iterdir()] == ["rest"]


@pytest.mark.parametrize("format", FORMATS)
def test_exports_to_a_disk_that_cannot_be_written_or_a_place_in_a_file(small_disk, tmp_path, format):
    saved(tmp_path / "saves", "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out.* written.*something of another kind"):
        weft.export_checkpoint(tmp_path / "saves", tmp_path / "file" / "out", format)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"out was not written: .*let this user \(id \d+\) write there"):
        weft.export_checkpoint(tmp_path / "saves", small_disk / "out", format)
    assert not [*small_disk.iterdir()]


@pytest.mark.parametrize("path", [3, None, b"bytes", "", "a\0b", "a\ud800b", ["a"]])
def test_paths_that_cannot_be(path, tmp_path):
    model, _ = made()
    saved(tmp_path, "a")
    calls = {
        "path": [
            lambda: weft.save_checkpoint(path, "b", model=model),
            lambda: weft.save_checkpoint(path, "b", partial=False, model=model),
            lambda: weft.resume_from_checkpoint(path, model=model),
            lambda: weft.resume_from_checkpoint(path, "b", partial=False, model=model),
            lambda: weft.read_model(path),
            lambda: weft.checkpoints(path, every=1),
        ],
        "target": [lambda: weft.export_checkpoint(tmp_path, path, "torch")],
        "f": [lambda: weft.save({}, path), lambda: weft.load(path)],
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(UsageError, match=rf"^{name} is .*: (pass a path|no file can have that name)"):
                call()


def test_a_path_that_is_too_long(tmp_path):
    saved(tmp_path / "saves", "a")
    for target in (tmp_path / ("a" * 300), Path(*["b" * 200] * 40)):
        with pytest.raises(CheckpointError, match=r"File name too long"):
            weft.export_checkpoint(tmp_path / "saves", target, "torch")
        with pytest.raises(CheckpointError, match=r"File name too long"):
            weft.save_checkpoint(target, "a", user_content=1)
