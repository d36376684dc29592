"""`weft simulate`, in this process: its figures are those of the simulation, and its mistakes are told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.cli.simulate import SearchProgress
from weft.graph import Graph, Unit
from weft.plan.option import Option, options
from weft.schedule import make, to_csv
from weft.simulate import Links, StageCost, simulate
from weft.timeline import Timeline
from weft.topology.cluster import Link

PROFILE = Path(__file__).parents[2] / "data" / "profiles" / "vgg16.txt"
MIB = 2**20


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Eight equal units: 1 ms forward, 2 ms backward, 1 MiB of everything."""
    path = tmp_path / "eight.graph.json"
    path.write_text(Graph(Unit(f"u{i}", 1.0, 2.0, MIB, MIB, MIB) for i in range(8)).to_json())
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main(["simulate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_those_of_the_simulation(graph: Path, capsys):
    found = report(
        capsys,
        graph,
        "--partitions",
        4,
        "--microbatches",
        8,
        "--schedule",
        "1f1b",
        "--link",
        "1GB/s,1ms",
    )
    made = make("1f1b", 4, 8)
    stage = StageCost(0.002, 0.004, 0.002, 0.002, MIB, MIB, 2 * MIB, 2 * MIB, 2 * MIB)
    step = simulate(made.ranks, made.rank_of_stage, [stage] * 4, Links.uniform(Link.parse("1GB/s,1ms")))
    assert found["step_ms"] == pytest.approx(step.step_s * 1e3)
    assert found["bubble"] == pytest.approx(step.bubble)
    for rank, (shares, idle) in enumerate(zip(found["ranks"], step.idle, strict=True)):
        assert shares["units"] == [f"u{2 * rank}", f"u{2 * rank + 1}"]
        assert {name: shares[name] for name in idle._fields} == pytest.approx(idle._asdict())
        assert shares["peak_bytes"] == step.peak_bytes[rank]


def test_auto_takes_the_best_and_explains_itself(graph: Path, capsys):
    arguments = [graph, "--partitions", 2, "--microbatches", 4, "--memory", "64MiB"]
    found = report(capsys, *arguments)
    assert {choice["option"] for choice in found["choices"]} == {str(option) for option in options(2, 4)}
    possible = [choice["step_ms"] for choice in found["choices"] if not choice["fault"]]
    assert found["step_ms"] == possible[0] == pytest.approx(min(possible), rel=1e-9)
    assert main(["simulate", *map(str, arguments)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{found['option']}: ")
    assert f"step {found['step_ms']:.3f} ms, bubble {found['bubble']:.1%}\n" in text
    assert "schedule " in text and "slower: " in text


def test_a_limit_on_memory_changes_the_choice(graph: Path, capsys):
    arguments = [graph, "--partitions", 2, "--microbatches", 4]
    free = report(capsys, *arguments)
    least = min(max(choice["peak_bytes"]) for choice in free["choices"])
    tight = report(capsys, *arguments, "--memory", f"{least}B")
    assert all(rank["peak_bytes"] <= least for rank in tight["ranks"])
    assert tight["step_ms"] > free["step_ms"] and tight["option"] != free["option"]
    assert any("it has" in choice["fault"] for choice in tight["choices"])
    either = report(capsys, *arguments, "--memory", f"{least}B,1GiB")
    assert either["ranks"][0]["peak_bytes"] <= least


@pytest.mark.parametrize(
    ("arguments", "stages", "option"),
    [
        (["--schedule", "interleaved_1f1b", "--chunks", "4"], 8, "interleaved_1f1b, 4 chunks"),
        (["--schedule", "looped_bfs"], 4, "looped_bfs"),
        (["--schedule", "zbv"], 4, "zbv"),
        (["--schedule", "zb_h1", "--active", "1"], 2, "zb_h1, 1 active"),
        (["--schedule", "list", "--chunks", "1"], 2, "list on 1f1b"),
        (["--schedule", "list", "--chunks", "3"], 6, "list on interleaved_1f1b, 3 chunks"),
        (["--schedule", "list"], None, "list on "),
    ],
)
def test_schedules_by_name(arguments: list[str], stages: int | None, option: str, graph: Path, capsys):
    found = report(capsys, graph, "--partitions", 2, "--microbatches", 4, *arguments)
    assert found["option"].startswith(option)
    assert stages is None or len(found["rank_of_stage"]) == stages
    assert found["schedule"] == Option(arguments[1]).schedule


def test_a_schedule_from_a_file(graph: Path, tmp_path: Path, capsys):
    csv = tmp_path / "schedule.csv"
    csv.write_text(to_csv(make("zbv", 2, 5)))
    found = report(capsys, graph, "--partitions", 2, "--schedule", "file", "--csv", csv)
    same = report(capsys, graph, "--partitions", 2, "--schedule", "zbv", "--microbatches", 5)
    assert found["microbatches"] == 5 and found["rank_of_stage"] == [0, 1, 1, 0]
    assert found["step_ms"] == pytest.approx(same["step_ms"])


def test_hosts(graph: Path, capsys):
    arguments = [graph, "--partitions", 4, "--schedule", "1f1b", "--link", "100GB/s"]
    near = report(capsys, *arguments)
    assert (
        near["step_ms"]
        < report(capsys, *arguments, "--inter-link", "1GB/s", "--ranks-per-host", 2)["step_ms"]
    )
    assert near["step_ms"] == report(capsys, *arguments, "--ranks-per-host", 3)["step_ms"]
    slow = report(capsys, *arguments, "--inter-link", "100MB/s", "--ranks-per-host", 3)
    assert near["step_ms"] < slow["step_ms"], "the last host has one rank"


def test_a_page_a_picture_and_a_timeline(graph: Path, tmp_path: Path, capsys):
    arguments = [graph, "--partitions", 2, "--schedule", "1f1b", "--link", "1GB/s"]
    html, out = tmp_path / "plan.html", tmp_path / "plan.json"
    found = report(capsys, *arguments, "--html", html, "--out", out)
    timeline = Timeline.from_json(out.read_text())
    assert timeline.duration_s * 1e3 == pytest.approx(found["step_ms"])
    text = html.read_text()
    assert "<title>eight.graph.json: 1f1b, 2 microbatches</title>" in text
    (shown,) = json.loads(text.split('<script id="data" type="application/json">')[1].split("</script>")[0])[
        "timelines"
    ]
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    report(capsys, *arguments, "--out", tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    report(capsys, *arguments, "--out", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert main(["draw", str(out), "--out", str(tmp_path / "again.html")]) == 0


def test_a_profile_is_read_too(capsys):
    assert main(["simulate", str(PROFILE), "--partitions", "2", "--schedule", "gpipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpipe: 2 stages on 2 ranks, 2 microbatches"
    assert lines[3].split() == ["rank", "units", "warm-up", "steady", "drain", "transfer", "peak"]
    assert [line.split()[0] for line in lines[5:]] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{graph}", "--partitions", "0"], "--partitions is 0: it must be at least 1"),
        (
            ["{graph}", "--partitions", "2", "--microbatches", "0"],
            "--microbatches is 0: it must be at least 1",
        ),
        (
            ["{graph}", "--partitions", "2", "--chunks", "2"],
            "--chunks is for --schedule interleaved_1f1b or looped_bfs or list, ",
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "zbv", "--active", "2"],
            "not for zbv: leave it out",
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "file"],
            "--schedule file needs the schedule: --csv schedule.csv",
        ),
        (
            ["{graph}", "--partitions", "2", "--csv", "x"],
            "--csv is for --schedule file, not for auto: leave it out",
        ),
        (
            ["{graph}", "--partitions", "2", "--out", "x.pdf"],
            '--out is "x.pdf": write a name that ends in .svg, .png, ',
        ),
        (
            ["{graph}", "--partitions", "2", "--inter-link", "1GB/s"],
            "--inter-link needs to know the hosts: --ranks-per-h",
        ),
        (
            ["{graph}", "--partitions", "2", "--link", "fast"],
            '"fast" is not a link, write for example "25GB/s,5us"',
        ),
        (
            ["{graph}", "--partitions", "2", "--memory", "1,2,3"],
            '"1" is not a size: write a number and a unit',
        ),
        (
            ["{graph}", "--partitions", "2", "--memory", "1B,1B,1B"],
            "--memory has 3 values for 2 partitions: give one",
        ),
        (
            ["{graph}", "--partitions", "2", "--memory-weight", "2"],
            "--memory-weight is 2.0: it must be a number from 0",
        ),
        (["{graph}", "--partitions", "9", "--schedule", "gpipe"], "8 units are not enough for 9 stages"),
        (
            ["{graph}", "--partitions", "2", "--schedule", "gpipe", "--memory", "1MiB"],
            "gpipe is not possible: rank 0 ",
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "interleaved_1f1b", "--chunks", "1"],
            'chunks is 1, "interleaved_1f1b" takes 2 chunks',
        ),
        (["nowhere.json", "--partitions", "2"], '"nowhere.json" cannot be read (No such file or directory'),
        (["{folder}", "--partitions", "2"], "cannot be read (Is a directory"),
        (["{folder}/latin.txt", "--partitions", "2"], "cannot be read (it is not text in UTF-8"),
        (["{folder}/bad.json", "--partitions", "2"], "bad.json: this is not JSON, so it cannot be a graph "),
        (["{folder}/bad.txt", "--partitions", "2"], 'bad.txt: line 1: "what" is not a layer'),
        (
            ["{graph}", "--partitions", "2", "--schedule", "file", "--csv", "no.csv"],
            '"no.csv" cannot be read (No such file',
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "file", "--csv", "{folder}/bad.txt"],
            "bad.txt: this is not a schedule as CSV",
        ),
        (
            ["{graph}", "--partitions", "3", "--schedule", "file", "--csv", "{folder}/two.csv"],
            "the file is for 2 ranks and 1 microbatches, but there are 3 and 1",
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "file", "--csv", "{folder}/odd.csv"],
            "the stages are on the ranks 1, 0: units are placed on stages that are dealt out in turn or as a V",
        ),
        (
            ["{graph}", "--partitions", "2", "--schedule", "gpipe", "--html", "{folder}"],
            "cannot be written: Is a directory",
        ),
    ],
)
def test_mistakes(arguments: list[str], text: str, graph: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.txt").write_text("what")
    (tmp_path / "latin.txt").write_bytes(b"\xe4")
    (tmp_path / "two.csv").write_text("0F0,0B0\n1F0,1B0\n")
    (tmp_path / "odd.csv").write_text("1F0,1B0\n0F0,0B0\n")
    arguments = [argument.format(graph=graph, folder=tmp_path) for argument in arguments]
    assert main(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft simulate: error: ") and text in error and error.count("\n") == 1


def test_an_illegal_schedule_is_shown(graph: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert (
        main(
            [
                "simulate",
                str(graph),
                "--partitions",
                "2",
                "--schedule",
                "file",
                "--csv",
                str(tmp_path / "bad.csv"),
            ]
        )
        == 2
    )
    assert "rank 1: 1B0 needs 1F0, which has not run by then" in capsys.readouterr().err


def test_replicas_add_up_gradients_and_may_share_states(graph: Path, capsys):
    """A unit of 1 MiB takes 4 MiB with gradients and moments, of which two replicas share 2 MiB."""
    asked = [graph, "--partitions", "2", "--schedule", "1f1b", "--link", "1GB/s"]
    alone, whole, shared = (
        report(capsys, *asked, *more)
        for more in ([], ["--replicas", "2"], ["--replicas", "2", "--shard-optimizer-state"])
    )
    units = [len(rank["units"]) for rank in whole["ranks"]]
    assert alone["reduce_ms"] == 0 and whole["step_ms"] == alone["step_ms"]
    assert whole["reduce_ms"] == shared["reduce_ms"] == pytest.approx(max(units) * MIB / 1e9 * 1e3)
    for rank, count in enumerate(units):
        peaks = [found["ranks"][rank]["peak_bytes"] for found in (whole, shared)]
        assert peaks[0] - peaks[1] == count * MIB
    assert main(["simulate", *map(str, asked), "--replicas", "2"]) == 0
    assert (
        f"; then 2 replicas all-reduce gradients for {whole['reduce_ms']:.3f} ms" in capsys.readouterr().out
    )


def test_where_nothing_fits_one_sentence_says_why(graph: Path, capsys):
    """Eight units of 1 MiB, four times with gradients and moments: 16 MiB on each of two ranks."""
    assert main(["simulate", str(graph), "--partitions", "2", "--memory", "1MiB"]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith(
        "weft simulate: error: nothing fits: parameters, gradients and optimizer states alone take 16 MiB a rank, of "
        "1 MiB; the nearest, "
    )
    assert error.endswith(" on one rank: give at least 33 partitions, or more memory\n")
    assert main(["simulate", str(graph), "--partitions", "2", "--memory", "17MiB"]) == 2
    assert (
        "on one rank: give more partitions, more memory, or smaller microbatches" in capsys.readouterr().err
    )


def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "weft", "simulate", str(PROFILE), "--partitions", "2"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream: io.StringIO, silent_s: float) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = SearchProgress(silent_s)
    progress(3, 12, 0.5)
    progress.close()
    return stream.getvalue()


def test_a_long_search_is_shown_and_erased(monkeypatch):
    assert (
        shown(monkeypatch, Terminal(), 0.0)
        == "\r\x1b[Ktried 3 of 12, best step so far 500.000 ms; Ctrl-C takes it\r\x1b[K"
    )


def test_short_searches_and_files_see_nothing(monkeypatch):
    assert shown(monkeypatch, Terminal(), 3600.0) == ""
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""
