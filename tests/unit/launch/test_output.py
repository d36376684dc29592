"""What the launcher shows of what its ranks write."""

from __future__ import annotations

import io

import pytest

from weft.launch.output import LINE_LIMIT, Lines, Sink


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


def test_an_unfinished_line_is_closed_before_another_writer():
    stream = io.BytesIO()
    sink = Sink(stream)
    sink.write("rank 0", b"\r10%")
    sink.write("rank 0", b"\r20%")
    sink.write("rank 1", b"[rank 1] hello\n")
    sink.write("rank 0", b"\r30%\n")
    assert stream.getvalue() == b"\r10%\r20%\n[rank 1] hello\n\r30%\n"


def test_a_stream_without_a_file_is_its_own_sink():
    assert Sink(io.BytesIO()).identity() is None


@pytest.mark.parametrize("portion", [1, 3, 7])
def test_portions_make_no_difference(portion: int):
    data = b"alpha\nbeta\r\n\ngamma"
    shown: list[bytes] = []
    lines = Lines(shown.append, b"> ")
    for start in range(0, len(data), portion):
        lines.feed(data[start : start + portion])
    lines.close()
    assert b"".join(shown) == b"> alpha\n> beta\n> \n> gamma\n"
