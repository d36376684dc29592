"""Files that are whole, cut, damaged, foreign, or of several hosts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import FormatError
from weft.profiler.format import HEADER_BYTES, RECORD, Header
from weft.profiler.reading import read_recording
from weft.profiler.recorder import Recorder, path_of

HERE, THERE = b"h" * 16, b"t" * 16


def write(folder: Path, rank: int, ranks: int, times, offset_s: float = 0.0, clock: bytes = HERE) -> Path:
    """A file with a forward span of half a second at each of the times."""
    recorder = Recorder(path_of(folder, rank), Header(rank, ranks, offset_s, clock))
    for number, time in enumerate(times):
        recorder.add("F", 1, number, time, time + 0.5)
    recorder.close()
    return path_of(folder, rank)


def starts(path: Path) -> list[tuple[int, float]]:
    return [(span.rank, round(span.start_s, 6)) for span in read_recording(path).timeline.spans]


def test_ranks_of_one_host_share_a_clock(tmp_path: Path):
    """Their offsets differ by how well they were measured, which must not show."""
    write(tmp_path, 0, 2, [100.0, 102.0], offset_s=5000.0)
    write(tmp_path, 1, 2, [101.0], offset_s=5000.0003)
    assert starts(tmp_path) == [(0, 0.0), (0, 2.0), (1, 1.0)]


def test_ranks_of_two_hosts_meet_on_the_wall_clock(tmp_path: Path):
    write(tmp_path, 0, 4, [100.0], offset_s=5000.0)
    write(tmp_path, 1, 4, [100.5], offset_s=5000.1)
    write(tmp_path, 2, 4, [10.0], offset_s=5091.0, clock=THERE)
    write(tmp_path, 3, 4, [10.5], offset_s=5091.2, clock=THERE)
    assert starts(tmp_path) == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]


def test_the_file_of_one_rank(tmp_path: Path):
    write(tmp_path, 0, 2, [1.0])
    assert starts(write(tmp_path, 1, 2, [3.0, 4.0])) == [(1, 0.0), (1, 1.0)]


def test_a_file_that_was_cut_gives_what_is_whole(tmp_path: Path):
    path = write(tmp_path, 0, 1, [1.0, 2.0, 3.0])
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    recording = read_recording(tmp_path)
    assert len(recording.timeline.spans) == 2
    assert recording.warnings == (
        f"{path} ends in the middle of a record: the rank died, or the file was cut",
    )


def test_damaged_records_are_left_out(tmp_path: Path):
    path = write(tmp_path, 0, 1, [1.0, 2.0, 3.0, 4.0])
    content = bytearray(path.read_bytes())
    for number in (1, 2):
        at = HEADER_BYTES + number * RECORD.size
        content[at : at + RECORD.size] = bytes(RECORD.size)
    path.write_bytes(content)
    recording = read_recording(tmp_path)
    assert [span.microbatch for span in recording.timeline.spans] == [0, 3]
    assert recording.warnings == (f"{path}: 2 of 4 records are damaged and left out, the first is number 1",)


def test_ranks_that_are_missing_or_of_another_job(tmp_path: Path):
    write(tmp_path, 1, 12, [1.0])
    write(tmp_path, 3, 4, [1.0])
    assert read_recording(tmp_path).warnings == (
        f"{tmp_path} holds files of jobs with 4 and 12 ranks: "
        "they do not belong together; record into an empty folder",
        f"{tmp_path} has no readable file of rank 0, 2, 4, 5, 6, 7, 8, 9 and others",
    )


def test_a_rank_whose_file_is_no_recording_is_left_out(tmp_path: Path):
    write(tmp_path, 0, 2, [1.0])
    path_of(tmp_path, 1).write_bytes(b"")
    recording = read_recording(tmp_path)
    assert recording.timeline.ranks == (0,)
    assert "this rank is left out" in recording.warnings[0] and "rank 1" in recording.warnings[1]


HEADER = Header(0, 1, 0.0, HERE).pack()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", r"is not a recording of weft: it begins with b'' instead of b'WEFTSPAN'"),
        (b"<svg xmlns", r"it begins with b'<svg xml' instead"),
        (HEADER[:20], "has 20 bytes, its header alone has 64: the rank ended before it could write it"),
        (HEADER[:8] + b"\2" + HEADER[9:], "is a recording of version 2, and this weft reads version 1"),
        (HEADER[:20] + b"\7" + HEADER[21:], "has a damaged header, so its times mean nothing: record again"),
        (HEADER, "holds no spans: the job ended before its first step did$"),
        (HEADER + b"x", "holds no spans: .*; .*ends in the middle of a record"),
    ],
)
def test_a_file_that_gives_nothing_is_an_error(content: bytes, text: str, tmp_path: Path):
    path = path_of(tmp_path, 0)
    path.write_bytes(content)
    with pytest.raises(FormatError, match=text):
        read_recording(path)
    with pytest.raises(FormatError, match=text.removesuffix("$")):
        read_recording(tmp_path)


def test_nothing_to_read(tmp_path: Path):
    with pytest.raises(
        FormatError, match="there is no file or folder .*nowhere: name what weft run --record wrote"
    ):
        read_recording(tmp_path / "nowhere")
    with pytest.raises(
        FormatError, match=r"holds no recording \(rank0.spans and so on\): write one with weft run"
    ):
        read_recording(tmp_path)
    path_of(tmp_path, 0).mkdir()
    with pytest.raises(FormatError, match="rank0.spans cannot be read .it is no regular file"):
        read_recording(tmp_path)


@settings(deadline=None)
@given(st.data())
def test_no_damage_is_a_traceback(data):
    """Bytes changed, cut and added anywhere: the intact part with a warning, or one clear error."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), 0, 1, [1.0, 2.0, 3.0])
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(bytes(content[:cut]) + data.draw(st.binary(max_size=40)))
        try:
            recording = read_recording(path)
        except FormatError as error:
            assert str(path) in str(error)
        else:
            assert recording.timeline.start_s == 0.0 and recording.timeline.duration_s >= 0.0
