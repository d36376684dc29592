"""Recordings on their way from a host, and what a launcher refuses of it: the other side is not trusted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from weft.errors import LaunchError
from weft.launch.remote import recordings
from weft.launch.remote.recordings import Arriving, files_of, lacking, messages


def filled(folder: Path) -> Path:
    folder.mkdir()
    (folder / "rank2.jsonl").write_bytes(os.urandom(recordings.PIECE + 5))
    (folder / "rank3.steps").write_bytes(b"")
    (folder / "rank30.jsonl").write_text("another rank's")
    (folder / "report.html").write_text("no recording")
    (folder / "rank2.link").symlink_to("/etc/passwd")
    return folder


def test_new_recordings_of_a_hosts_ranks_arrive_whole(tmp_path: Path):
    there, here, ranks = filled(tmp_path / "there"), tmp_path / "here", range(2, 4)
    before = files_of(there, ranks)
    assert set(before) == {"rank2.jsonl", "rank3.steps"} and lacking(there, ranks, before)
    assert [each["kind"] for each, _ in messages(there, ranks, before)] == ["brought"]
    arriving = Arriving(here, ranks)
    for each in messages(there, ranks, {}):
        assert not arriving.over
        arriving.take(*each)
    assert arriving.over and (arriving.files, arriving.size) == (2, recordings.PIECE + 5)
    assert {path.name for path in here.iterdir()} == set(before) and not lacking(here, ranks, {})
    assert (here / "rank2.jsonl").read_bytes() == (there / "rank2.jsonl").read_bytes()
    arriving = Arriving(here, ranks)
    arriving.take({"kind": "file", "name": "rank2.jsonl", "size": 9}, b"")
    arriving.take({"kind": "piece"}, b"part")
    arriving.close()
    assert {path.name for path in here.iterdir()} == set(before)
    assert (here / "rank2.jsonl").read_bytes() == (there / "rank2.jsonl").read_bytes()


def a_file(name: Any = "rank2.jsonl", size: Any = 4) -> tuple[dict[str, Any], bytes]:
    return {"kind": "file", "name": name, "size": size}, b""


PIECE = ({"kind": "piece"}, b"12345")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([a_file("rank1.jsonl")], "'rank1.jsonl' is no recording of its ranks"),
        ([a_file("rank2.jsonl/../../x")], "is no recording of its ranks"),
        ([a_file("../rank2.jsonl")], "is no recording of its ranks"),
        ([a_file("rank2")], "is no recording"),
        ([a_file("rank2.\n")], "is no recording"),
        ([a_file("rank2." + "a" * 500)], "is no recording"),
        ([a_file(["rank2.x"])], "is no recording"),
        ([a_file(None)], "is no recording"),
        ([a_file(size=-1)], "cannot have -1 bytes"),
        ([a_file(size=True)], "cannot have True bytes"),
        ([a_file(size="4")], "cannot have '4' bytes"),
        ([a_file(size=1 << 70)], "there is no room"),
        ([a_file(), PIECE], "it sends more than it has announced"),
        ([PIECE], "it sends more than it has announced"),
        ([a_file(), a_file()], "rank2.jsonl ended too early"),
        ([a_file(), ({"kind": "brought"}, b"")], "rank2.jsonl ended too early"),
        ([({"kind": "unread", "text": "rank2.x: Permission denied"}, b"")], "it cannot read 'rank2.x: Perm"),
        ([a_file(size=0)] * (recordings.MOST_FILES + 1), "it has too many files"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, said: list[Any], told: str):
    arriving = Arriving(tmp_path / "here", range(2, 4))
    with pytest.raises(LaunchError) as error:
        for each in said:
            arriving.take(*each)
    arriving.close()
    assert told in str(error.value)
    assert {path.name for path in tmp_path.rglob("*")} <= {"here", "rank2.jsonl"}


def test_what_is_in_the_way_is_not_written_through(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    folder = tmp_path / "here"
    (folder / "rank3.steps").mkdir(parents=True)
    (folder / "rank2.jsonl").symlink_to(victim)
    arriving = Arriving(folder, range(2, 4))
    arriving.take(*a_file())
    arriving.take({"kind": "piece"}, b"1234")
    assert victim.read_text() == "kept" and (folder / "rank2.jsonl").read_text() == "1234"
    with pytest.raises(LaunchError, match="here: Is a directory"):
        arriving.take(*a_file("rank3.steps", 0))
    arriving.close()
    assert {path.name for path in folder.iterdir()} == {"rank2.jsonl", "rank3.steps"}
