"""`weft draw`, in this process."""

from __future__ import annotations

import json
import os
import re
from itertools import accumulate
from pathlib import Path

import pytest

from weft.cli.draw import last_whole_step, write
from weft.cli.main import main
from weft.profiler.recorder import Recorder, path_of
from weft.timeline import Span, Timeline


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two ranks and three steps, the last of which rank 1 did not end."""
    folder = tmp_path / "recording"
    for rank in range(2):
        recorder = Recorder.open(folder, rank, 2)
        for step in (1, 2, 3):
            recorder.add("F", step, 0, 10.0 * step, 10.0 * step + 1)
            recorder.add("B", step, 0, 10.0 * step + 1, 10.0 * step + 3)
            if (rank, step) != (1, 3):
                recorder.add("step", step, -1, 10.0 * step, 10.0 * step + 4)
        recorder.close()
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(Timeline([Span(0, "F", 0, 0.0, 1.0), Span(1, "F", 0, 1.0, 2.0)]).to_json())
    return path


def drawn(name: str, *arguments: object, tmp_path: Path) -> str:
    out = tmp_path / name
    assert main(["draw", *map(str, arguments), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def data_of(text: str) -> list[dict]:
    content = text.split('<script id="data" type="application/json">')[1].split("</script>")[0]
    return json.loads(content)["timelines"]


def test_a_page_and_a_trace_show_all_steps(recording: Path, tmp_path: Path, capsys):
    (timeline,) = data_of(drawn("x.html", recording, tmp_path=tmp_path))
    assert (timeline["name"], timeline["length"]) == ("recording", 24_000_000_000)
    assert set(accumulate(timeline["ranks"][0]["spans"]["step"])) == {1, 2, 3}
    events = json.loads(drawn("x.json", recording, tmp_path=tmp_path))["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {1, 2, 3}
    (first, second), error = capsys.readouterr().out.splitlines(), capsys.readouterr().err
    assert re.fullmatch(r"wrote .*x\.html: 2 ranks, 3 steps, [\d.]+ KiB", first) and not error
    assert re.fullmatch(r"wrote .*x\.json: 2 ranks, 3 steps, [\d.]+ KiB", second)


def test_a_picture_shows_the_last_whole_step(recording: Path, tmp_path: Path, capsys):
    text = drawn("x.svg", recording, tmp_path=tmp_path)
    assert "<title>recording, step 2</title>" in text and "step 2," in text and "step 3" not in text
    told, written = capsys.readouterr().out.splitlines()
    assert told == "weft draw: step 2 of 1 to 3 is drawn; --step N draws another one"
    assert re.fullmatch(r"wrote .*x\.svg: 2 ranks, 1 step, [\d.]+ KiB", written)
    assert "step 3," in drawn("x.svg", recording, "--step", 3, "--title", "mine", tmp_path=tmp_path)
    assert main(["draw", str(recording), "--step", "1", "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_one_step_begins_at_zero(recording: Path, tmp_path: Path):
    (timeline,) = data_of(drawn("x.html", recording, "--step", 3, tmp_path=tmp_path))
    assert timeline["name"] == "recording, step 3" and min(timeline["ranks"][0]["spans"]["start"]) == 0


def test_a_plan_above_a_recording(recording: Path, plan: Path, tmp_path: Path):
    first, second = data_of(drawn("x.html", plan, recording, "--step", 1, tmp_path=tmp_path))
    assert (first["name"], second["name"]) == ("plan.json", "recording, step 1")
    _, second = data_of(drawn("x.html", plan, recording, tmp_path=tmp_path))
    assert second["name"] == "recording, step 2"


def test_the_file_of_one_rank_and_json(recording: Path, plan: Path, tmp_path: Path):
    (timeline,) = data_of(drawn("x.html", path_of(recording, 1), tmp_path=tmp_path))
    assert [rank["rank"] for rank in timeline["ranks"]] == [1]
    assert "rank 1" in drawn("x.svg", plan, tmp_path=tmp_path)


def test_what_is_damaged_is_told(recording: Path, tmp_path: Path, capsys):
    path = path_of(recording, 1)
    path.write_bytes(path.read_bytes()[:-5])
    drawn("x.html", recording, tmp_path=tmp_path)
    assert capsys.readouterr().err == (
        f"weft draw: warning: {path} ends in the middle of a record: the rank died, or the file was cut\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{recording}", "--out", "x.pdf"], '--out is "x.pdf": write a name that ends in .html, .svg, .png, .json'),
        (["{plan}", "{plan}", "--out", "x.svg"], "2 timelines are given; a page (.html) shows up to 2, other files 1"),
        (["{plan}", "{plan}", "{plan}", "--out", "x.html"], "3 timelines are given; a page (.html) shows up to 2"),
        (["{recording}", "--step", "9", "--out", "x.svg"], "step 9 is not in this timeline, which has the steps 1 "),
        (["{plan}", "--step", "1", "--out", "x.svg"], "step 1 is not in this timeline, which has no steps"),
        (["nowhere", "--out", "x.svg"], "there is no file or folder nowhere"),
        (["{folder}/bad.json", "--out", "x.svg"], "bad.json: this is not JSON, so it cannot be a timeline"),
        (["{folder}/latin.json", "--out", "x.svg"], "latin.json\" cannot be read (it is not text in UTF-8"),
        (["{folder}/other.svg", "--out", "x.svg"], "other.svg is not a recording of weft: it begins with b'<svg>'"),
        (["{plan}", "--out", "{folder}/no/x.svg"], "x.svg cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], text: str, recording: Path, plan: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "latin.json").write_bytes(b"\xe4")
    (tmp_path / "other.svg").write_text("<svg>")
    names = {"recording": recording, "plan": plan, "folder": tmp_path}
    assert main(["draw", *(argument.format(**names) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft draw: error: ") and text in error


def test_the_last_step_where_none_is_whole():
    assert last_whole_step(Timeline([Span(0, "F", 0, step, step + 1, step=step) for step in (4, 5)])) == 5


def test_a_folder_of_traces_one_a_rank(recording: Path, tmp_path: Path, capsys):
    out = tmp_path / "deep" / "traces"
    assert main(["draw", str(recording), "--out", f"{out}/"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["rank0.json", "rank1.json"]
    assert json.loads((out / "rank1.json").read_text())["distributedInfo"]["rank"] == 1
    assert capsys.readouterr().out == f"wrote 2 traces into {out}/\n"
    (tmp_path / "file").write_text("")
    assert main(["draw", str(recording), "--out", f"{tmp_path / 'file'}/"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_is_no_file_is_written_as_it_is(tmp_path: Path):
    pipe = tmp_path / "pipe.svg"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe, "<svg>")
        assert os.read(reader, 100) == b"<svg>" and pipe.is_fifo()
    finally:
        os.close(reader)
    (tmp_path / "real.svg").write_text("old")
    (tmp_path / "link.svg").symlink_to("real.svg")
    write(tmp_path / "link.svg", "new")
    assert (tmp_path / "link.svg").is_symlink() and (tmp_path / "real.svg").read_text() == "new"
