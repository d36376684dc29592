"""Files made to do harm: nothing of them runs, and nothing outside of a checkpoint's folder is read."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

import weft.torch as weft
from weft.errors import CheckpointError
from weft.torch.checkpoint.formats.source import Distributed, open_source

from .training import made, saved, train, values

pytestmark = pytest.mark.usefixtures("job")


class Evil:
    """Makes a file, wherever it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def old_partial(root: Path, **replaced) -> Path:
    """A folder of files for each rank, some of them with other content."""
    model, optimizer = made()
    folder = root / "t_partial"
    folder.mkdir()
    contents = {
        "model_0_0": model.local_state_dict(), "optimizer_0_0": optimizer.local_state_dict(), "user_content": {"a": 1},
    }  # fmt: skip
    for name, content in (contents | replaced).items():
        torch.save(content, folder / f"{name}.pt")
    return root


def full(root: Path, name: str, evil: Evil) -> Path:
    """A full checkpoint without a manifest, one of whose files is evil."""
    model, _ = made()
    torch.save(model.module.state_dict(), root / "a")
    torch.save({"a": evil}, root / name)
    return root


def in_folder(root: Path, name: str, content) -> Path:
    torch.save(content, root / name)
    return root


def pickled_content(root: Path, evil: Evil) -> Path:
    model, _ = made()
    weft.save_checkpoint(root, "a", model=model, user_content=[evil], allow_pickle=True)
    return root


KINDS = {
    "single file": lambda root, evil: (in_folder(root, "x", {"model": evil}) / "x", {"partial": False}),
    "folder of a full model": lambda root, evil: (
        in_folder(root, "pytorch_model.bin", evil),
        {"partial": False},
    ),
    "full": lambda root, evil: (full(root, "a", evil), {"tag": "a", "partial": False}),
    "content of full": lambda root, evil: (
        full(root, "user_content_a", evil),
        {"tag": "a", "partial": False},
    ),
    "old model": lambda root, evil: (old_partial(root, model_0_0={"w": evil}), {"tag": "t"}),
    "old optimizer": lambda root, evil: (old_partial(root, optimizer_0_0=[evil]), {"tag": "t"}),
    "old 16-bit states": lambda root, evil: (old_partial(root, fp16_states_0_0=[evil]), {"tag": "t"}),
    "old content": lambda root, evil: (old_partial(root, user_content=evil), {"tag": "t"}),
    "own content": lambda root, evil: (pickled_content(root, evil), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_checkpoint_runs_code(tmp_path, kind):
    marker = tmp_path / "ran"
    (tmp_path / "root").mkdir()
    path, arguments = KINDS[kind](tmp_path / "root", Evil(marker))
    model, optimizer = weft_model()
    before = values(model)
    with pytest.raises(CheckpointError, match="pass allow_pickle=True"):
        weft.resume_from_checkpoint(path, model=model, optimizer=optimizer, **arguments)
    assert not marker.exists()
    for name, value in values(model).items():
        assert torch.equal(value, before[name])


def weft_model():
    model, optimizer = made(1)
    train(model, optimizer)
    return model, optimizer


def test_no_other_file_runs_code(tmp_path):
    evil = Evil(tmp_path / "ran")
    torch.save(evil, tmp_path / "x_0_0")
    with pytest.raises(CheckpointError, match="pass allow_pickle=True"):
        weft.load(str(tmp_path / "x"))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(CheckpointError, match="nothing of it ran .*mkdir does not belong there"):
        Distributed(tmp_path)
    assert not (tmp_path / "ran").exists()


# --- names that lead out of the folder ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["index.json", "DONE", "rank-0000.safetensors"])
def test_links_are_not_followed(tmp_path, name):
    saved(tmp_path, "a")
    file = tmp_path / "a_partial" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"{name} is a link, which checkpoints do not have"):
        weft.resume_from_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["../a", "/etc/passwd", "a/../../b", ".", "a\nb", "x" * 300])
def test_a_newest_that_leads_elsewhere_is_not_followed(tmp_path, caplog, content):
    saved(tmp_path, "a")
    (tmp_path / "newest").write_text(content)
    assert weft.resume_from_checkpoint(tmp_path) == {"number": 0}
    assert "newest cannot be used" in caplog.text


def test_a_newest_that_is_a_link_is_not_followed(tmp_path, caplog):
    saved(tmp_path, "a")
    (tmp_path / "newest").rename(tmp_path / "elsewhere")
    (tmp_path / "newest").symlink_to(tmp_path / "elsewhere")
    assert weft.resume_from_checkpoint(tmp_path) == {"number": 0}
    assert "is a link" in caplog.text


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/b", ""])
def test_an_index_of_safetensors_stays_in_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="no file in its folder"):
        open_source(tmp_path)


# --- sizes that are not true ----------------------------------------------------------------------------------


def header(offsets: list[list[int]], shape: list[int]) -> bytes:
    tensors = {
        f"w{n}": {"dtype": "F32", "shape": shape, "data_offsets": pair} for n, pair in enumerate(offsets)
    }
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


@pytest.mark.parametrize(
    "content",
    [
        (200 << 20).to_bytes(8, "little") + b"{}",
        (1 << 63).to_bytes(8, "little") + b"{}",
        header([[0, 16], [8, 24]], [4]),
        header([[-16, 0]], [4]),
        header([[0, 1 << 40]], [1 << 38]),
        header([[0, 16]], [-4]),
        header([[16, 0]], [4]),
        b"",
    ],
    ids=[
        "long header",
        "endless header",
        "overlap",
        "negative offset",
        "huge",
        "negative size",
        "backwards",
        "empty",
    ],
)
def test_hostile_safetensors_are_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged, or no safetensors file"):
        open_source(path)
