"""What the launcher shows of what its ranks write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.launch.output import KEPT_LIMIT, LINE_LIMIT, Lines, Sink, Streams


def test_only_whole_lines_are_shown_with_their_prefix():
    shown: list[bytes] = []
    lines = Lines(shown.append, b"[rank 1] ")
    lines.feed(b"one\ntw")
    lines.flush()
    assert shown == [b"[rank 1] one\n"]
    lines.feed(b"o\n")
    lines.feed(b"rest")
    lines.close()
    assert shown == [b"[rank 1] one\n", b"[rank 1] two\n", b"[rank 1] rest\n"]


def test_of_a_progress_line_the_last_state_is_shown():
    shown: list[bytes] = []
    lines = Lines(shown.append)
    lines.feed(b"\r10%\r50%")
    lines.feed(b"\r100%\r\n")
    assert shown == [b"100%\n"]


def test_a_live_rank_shows_its_progress_at_once():
    shown: list[bytes] = []
    lines = Lines(shown.append, live=True)
    lines.feed(b"\r10%")
    lines.feed(b"\r50%\r\ndone\nprompt> ")
    assert shown == [b"\r10%", b"\r50%\r\n", b"done\n"]
    lines.flush()
    assert shown[-1] == b"prompt> "


def test_a_line_without_end_is_shown_in_parts():
    shown: list[bytes] = []
    lines = Lines(shown.append)
    lines.feed(b"x" * (LINE_LIMIT + 1))
    assert shown == [b"x" * (LINE_LIMIT + 1) + b"\n"]


def test_an_unfinished_line_is_closed_before_another_writer(tmp_path: Path):
    with (tmp_path / "shown").open("w+b", 0) as file:
        sink = Sink(file.fileno())
        sink.write("rank 0", b"\r10%")
        sink.write("rank 0", b"\r20%")
        sink.write("rank 1", b"[rank 1] hello\n")
        sink.write("rank 0", b"\r30%\n")
        file.seek(0)
        assert file.read() == b"\r10%\r20%\n[rank 1] hello\n\r30%\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def test_what_the_reader_does_not_take_is_kept_and_handed_on_later(pipe: tuple[int, int]):
    reading, writing = pipe
    sink = Sink(writing)
    given = bytes(range(256)) * (2 * KEPT_LIMIT // 256)
    sink.write(None, given)
    assert sink.waiting and sink.full
    found = b""
    while sink.waiting:
        found += os.read(reading, 1 << 20)
        sink.push()
    os.close(writing)
    while part := os.read(reading, 1 << 20):
        found += part
    assert found == given and not sink.full


def test_a_reader_that_went_away_is_told(pipe: tuple[int, int]):
    reading, writing = pipe
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        Sink(writing).write(None, b"x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_told_once_on_the_other_stream(tmp_path: Path):
    with open("/dev/full", "wb", 0) as full, (tmp_path / "errors").open("w+b", 0) as errors:
        streams = Streams(full.fileno(), errors.fileno())
        for _ in range(2):
            streams.out.write(None, b"x\n")
            streams.push()
        assert streams.lost and not streams.waiting
        errors.seek(0)
        text = (
            "the standard output cannot be written to: No space left on device. What is written there is lost"
        )
        assert errors.read().decode() == f"weft: {text}\n"


def test_one_file_is_one_sink(tmp_path: Path):
    with (tmp_path / "both").open("wb") as file:
        streams = Streams(file.fileno(), file.fileno())
        assert streams.out is streams.err
