"""A save of tensors that no framework made: what is written, what the ranks must agree on, how a failure ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.checkpoint import shard
from weft.checkpoint.find import faults, look
from weft.checkpoint.index import Entry, Shard
from weft.checkpoint.save import PendingSave, Request, SaveReport, Saves, Storage, differences, run
from weft.checkpoint.shard import Part
from weft.errors import CheckpointError, UsageError
from weft.topology.mesh import Mesh


class Store:
    """A job's store, for one process."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}

    def set(self, key: str, text: str) -> None:
        self.texts[key] = text.encode()

    def get(self, key: str) -> bytes:
        return self.texts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)

    def delete_key(self, key: str) -> None:
        self.texts.pop(key, None)


def job() -> Any:
    made = SimpleNamespace(
        settings=SimpleNamespace(wait_timeout=5.0),
        recorder=None,
        place=SimpleNamespace(rank=0, world_size=1),
        mesh=Mesh(1, 1),
        monitor=SimpleNamespace(note=lambda *told: None, signs=dict, course=SimpleNamespace(saves=0)),
        steps=3,
        store=Store(),
        saves=None,
    )
    made.keep_saves = functools.partial(setattr, made, "saves")
    return made


def stage(tensors: Mapping[str, Any], copy: bool) -> dict[str, Any]:
    return {path: bytes(content) if copy else content for path, content in tensors.items()}


def write(
    folder: Path, name: str, tensors: Mapping[str, Any], reached: Callable[[str], None]
) -> tuple[Shard, dict[str, Entry]]:
    """A safetensors file of rows of bytes."""
    rows = {path: ("uint8", (len(row),), memoryview(row)) for path, row in tensors.items()}
    return shard.write(folder, name, rows, reached)


def save(this: Any, root: Path, content: Any, background: bool = False, **given: Any) -> Any:
    request = Request(root, "a", None, background, given.get("reached", lambda phase: None))
    make = given.get("make", lambda: Part({"x": b"abc"}, {"user": content, "rank": {"pp": 0}}))
    return run(this, request, make, Storage(stage, write))


@pytest.mark.parametrize("background", [False, True])
def test_tensors_of_any_kind_are_saved(tmp_path, background):
    this = job()
    found = save(this, tmp_path, {"n": 1}, background)
    assert isinstance(found, PendingSave if background else SaveReport)
    report = found.wait() if background else found
    assert report.folder == tmp_path / "a_partial" and report.written_bytes == 3
    index = look(report.folder).index
    assert index is not None and faults(report.folder, index) == []
    assert index.content["user"] == {"n": 1} and index.content["ranks"] == {"0": {"pp": 0}}
    entry = index.tensors["x"]
    file = (report.folder / entry.shard).read_bytes()
    assert (entry.dtype, entry.shape, file[entry.start : entry.start + entry.size]) == ("uint8", (3,), b"abc")
    assert list(this.store.texts) == ["checkpoint/last"], "a save leaves nothing of its meeting behind"
    Saves.of(this).close()


def test_a_fault_of_the_script_leaves_nothing(tmp_path):
    def make() -> Part:
        raise UsageError("no such thing can be saved")

    this = job()
    with pytest.raises(UsageError, match="^rank 0: no such thing can be saved$"):
        save(this, tmp_path, None, make=make)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_the_disk_keeps_the_save_before(tmp_path):
    def reached(phase: str) -> None:
        if phase == "write":
            raise OSError(28, "No space left on device")

    this = job()
    save(this, tmp_path, "before")
    with pytest.raises(
        CheckpointError, match="a was not saved: rank 0: .*Earlier checkpoints in .* as they were"
    ):
        save(this, tmp_path, "after", reached=reached)
    folders = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert folders == ["a_partial"]
    index = look(tmp_path / "a_partial").index
    assert index is not None and index.content["user"] == "before"
    assert save(this, tmp_path, "again").folder.name == "a_partial-2"
    Saves.of(this).close()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, None),
        ({"tag": "b"}, "the tag must be the same on every rank, it is 'a' on rank 0, 'b' on rank 1"),
        ({"path": "/y", "tag": "b"}, "the path must be the same on every rank, it is '/x' on rank 0, '/y' on rank 1"),
        ({"call": "resume", "tag": "b"}, "the call must be the same on every rank, it is 'save' on rank 0, "
                                         "'resume' on rank 1"),
    ],
)  # fmt: skip
def test_calls_of_ranks_are_compared(changed, text):
    here = {"call": "save", "path": "/x", "tag": "a"}
    found = differences({1: {**here, **changed}, 0: here})
    assert found[:1] == ([] if text is None else [text])
    assert len(found) == (1 if "call" in changed else len(changed))
