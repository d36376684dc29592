"""Files and folders that are damaged, in the way, or closed to this user: named, with what to do, and never harmful."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import weft.torch as weft
from weft.checkpoint.find import in_order
from weft.errors import CheckpointError

from .training import assert_equal, made, saved, values

pytestmark = pytest.mark.usefixtures("job")

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for closed in (folder, *folder.glob("*_partial")):
        closed.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read and write everything: become somebody else for a moment."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def test_every_flipped_bit_in_newest_is_said_or_does_nothing(tmp_path, caplog):
    saved(tmp_path, "s0", "s1")  # one bit apart
    newest = tmp_path / "newest"
    whole = newest.read_bytes()
    older = 0
    for at in range(8 * len(whole)):
        caplog.clear()
        newest.write_bytes(bytes(byte ^ (at // 8 == place) << at % 8 for place, byte in enumerate(whole)))
        taken = in_order(tmp_path, None)[0]
        named = newest.read_text(errors="replace").strip()
        assert named == "s1" or f"{newest} " in caplog.text, at
        assert taken.tag == ("s0" if named == "s0" else "s1")
        older += taken.tag == "s0"
    assert older == 1
    newest.write_text("s0\n")
    assert weft.resume_from_checkpoint(tmp_path) == {"number": 0}
    assert "names 's0', although 's1' was saved later; pass tag='s1' to take that" in caplog.text
    newest.write_text("s7\n")
    assert weft.resume_from_checkpoint(tmp_path) == {"number": 1}
    assert "names 's7', which is not there: taking the newest save that is" in caplog.text


@pytest.mark.parametrize("name", ["index.json", "DONE", "rank-0000.safetensors"])
@pytest.mark.parametrize("damage", ["empty", "half", "a folder"])
def test_the_save_before_the_damaged_one_is_taken(tmp_path, caplog, name, damage):
    model, _ = saved(tmp_path, "a", "b")
    file = tmp_path / "b_partial" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
    before = values(model)
    with pytest.raises(CheckpointError, match=rf"b_partial/{name} .*resume_from_checkpoint\(path, tag='a'\)"):
        weft.resume_from_checkpoint(tmp_path, "b", model=model)
    assert_equal(model, before)
    assert weft.resume_from_checkpoint(tmp_path, model=model) == {"number": 0}
    assert "a_partial, because newer checkpoints are not whole" in caplog.text and name in caplog.text


def test_a_file_in_the_place_of_a_folder(tmp_path):
    model, _ = made()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for partial in (True, False):
            with pytest.raises(
                CheckpointError, match="of another kind is in its place: remove that, or save to"
            ):
                weft.save_checkpoint(path, "a", partial, model=model)
    with pytest.raises(CheckpointError, match="is no folder, so there is no checkpoint"):
        weft.resume_from_checkpoint(tmp_path / "file")


def test_a_save_that_cannot_be_named_does_not_stay(tmp_path):
    model, _ = saved(tmp_path, "a")
    (tmp_path / "newest").unlink()
    (tmp_path / "newest").mkdir()
    with pytest.raises(CheckpointError, match=r"b was not saved: .*newest.*remove that, or save to"):
        weft.save_checkpoint(tmp_path, "b", model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "a_partial", "newest"]
    assert weft.resume_from_checkpoint(tmp_path, model=model) == {"number": 0}
    (tmp_path / "newest").rmdir()
    weft.save_checkpoint(tmp_path, "b", model=model)


def test_folders_that_this_user_may_not_use(open_folder):
    model, _ = saved(open_folder, "a", "b")
    weft.shutdown()  # gives the lock back
    weft.init({})
    model, _ = made()
    (open_folder / "b_partial").chmod(0o000)
    open_folder.chmod(0o555)
    with without_rights():
        for partial in (True, False):
            with pytest.raises(CheckpointError, match=r"c was not saved: .*let this user \(id \d+\) write"):
                weft.save_checkpoint(open_folder, "c", partial, model=model)
        with pytest.raises(CheckpointError, match=r"DONE cannot be read by this user .*tag='a'"):
            weft.resume_from_checkpoint(open_folder, "b", model=model)
        assert weft.resume_from_checkpoint(open_folder, model=model) == {"number": 0}
    open_folder.chmod(0o000)
    with without_rights(), pytest.raises(CheckpointError, match=r"let this user \(id \d+\) read there"):
        weft.resume_from_checkpoint(open_folder, model=model)


def test_a_disk_that_cannot_be_read(tmp_path, monkeypatch):
    model, _ = saved(tmp_path, "a")

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(CheckpointError, match=r"a_partial cannot be read by rank 0: .*Input/output error"):
        weft.resume_from_checkpoint(tmp_path, model=model)


def test_leftovers_of_any_kind_are_removed(tmp_path):
    model, _ = saved(tmp_path, "a")
    for partial in (True, False):
        (tmp_path / ".saving-newest-12").write_text("t")
        (tmp_path / ".saving-b-34").mkdir()
        (tmp_path / ".saving-b-34" / "rank-0000.safetensors").write_text("")
        (tmp_path / ".saving-link").symlink_to(tmp_path / "a_partial")
        weft.save_checkpoint(tmp_path, "b", partial, model=model)
        assert [path.name for path in tmp_path.glob(".*")] == [".lock"]
        assert (tmp_path / "a_partial" / "DONE").exists()
