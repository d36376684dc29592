"""Which files of a folder are measured, and what is known of the system's memory of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weft.errors import UsageError
from weft.measure.files import Held, files_of, forget, own_file, share_in_memory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "below" / "more").mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"a" * 5000)
    (folder / "below" / "more" / "b.bin").write_bytes(b"b" * 100)
    return folder


def test_regular_files_below_a_folder_count_and_nothing_else(data: Path, tmp_path: Path):
    (data / "empty").touch()
    os.mkfifo(data / "pipe")
    (data / "circle").symlink_to(data)
    (data / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "elsewhere.bin").write_bytes(b"c" * 7)
    (data / "link.bin").symlink_to(tmp_path / "elsewhere.bin")
    found = {Path(held.path).name: held.size for held in files_of(data)}
    assert found == {"a.bin": 5000, "b.bin": 100, "link.bin": 7}
    assert len(files_of(data, most=2)) == 2
    assert files_of(data / "a.bin") == [Held(str(data / "a.bin"), 5000)]


def test_nothing_to_read_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="has no files that can be read.*--write 1GB"):
        files_of(tmp_path)
    with pytest.raises(UsageError, match="no folder and no file"):
        files_of(tmp_path / "nowhere")


def test_an_own_file_is_gone_at_the_end_however_that_comes(tmp_path: Path):
    with pytest.raises(KeyError), own_file(tmp_path, 3 << 22) as files:
        assert [held.size for held in files] == [3 << 22] == [Path(files[0].path).stat().st_size]
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="has room for .* write less"), own_file(tmp_path, 1 << 60):
        pass
    with pytest.raises(UsageError, match="nothing can be written"), own_file(tmp_path / "nowhere", 10):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what it has in memory")
def test_a_file_that_was_just_read_is_in_memory(data: Path):
    files = files_of(data)
    for held in files:
        Path(held.path).read_bytes()
    assert share_in_memory(files) in (1.0, None), "None on a file system that does not say"
    forget(files)
    assert [Path(held.path).stat().st_size for held in files] == [held.size for held in files]
    assert share_in_memory([Held(str(data / "nowhere"), 5)]) is None
