"""`weft report`, in this process."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.unit.report.run.reports import MS, made
from weft.analysis.run import Run
from weft.cli import report as command
from weft.cli.main import main
from weft.cli.report import write_page
from weft.errors import FormatError
from weft.profiler.recorder import Recorder
from weft.rules.rule import Rule


def nothing(rank: int, step: int) -> dict[str, object]:
    return {}


RUNS = {
    "out": lambda: made("out"),
    "slow": lambda: made("slow", data_s=10 * MS),
    "clean": lambda: replace(
        made("clean", slow={}, microbatches=32, transfer_s=0.0, step_values=nothing), samples={}
    ),
    "one": lambda: made("one", partitions=2, slow={}, units=False),
    "two": lambda: made("two", partitions=2, slow={}, replicas=2, reduce_s=MS, units=False),
}


@dataclass(frozen=True)
class ManySteps(Rule):
    """The run has more steps than anybody needs."""

    most: int = 10

    def evaluate(self, analysis):
        steps = len(analysis.timeline.steps)
        return self.warning(f"{steps} steps") if steps > self.most else self.passed()


@pytest.fixture(autouse=True)
def runs(monkeypatch, tmp_path: Path) -> Path:
    """Folders that hold made runs, by their names; the working directory is the one that they are in."""
    monkeypatch.chdir(tmp_path)
    for name in RUNS:
        (tmp_path / name).mkdir()

    def read(path: Path) -> Run:
        if path.name not in RUNS:
            raise FormatError(f"{path} holds no recording")
        return RUNS[path.name]()

    monkeypatch.setattr(command, "read_run", read)
    return tmp_path


def test_text(capsys):
    assert main(["report", "out"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("out\n") and "LastPartitionHeavy" in out and "Each rank's usual step" in out


def test_a_page_is_written_and_told(runs: Path, capsys):
    assert main(["report", "out", "--html"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"wrote out/report\.html: 4 ranks, 20 steps, [\d.]+ KiB", first)
    assert second.startswith(("warning: LastPartitionHeavy", "critical: LastPartitionHeavy"))
    assert (runs / "out" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert main(["report", "out", "--html", "mine.html", "--step", "7"]) == 0
    assert '"first":7' in (runs / "mine.html").read_text()


def test_json_is_alone_on_the_output(capsys):
    assert main(["report", "out", "--json", "--html"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["run"] == "out" and error.startswith("wrote out/report.html")


def test_against_an_earlier_run(capsys):
    assert main(["report", "slow", "--against", "out"]) == 0
    out = capsys.readouterr().out
    assert "most of all by data" in out and "A usual step, before and now" in out


def test_beside_a_plan(runs: Path, capsys):
    entry = {
        "division": {"data": 1, "pipeline": 4}, "step_s": 0.02, "memory_bytes": 1 << 20,
        "settings": {"partitions": 4, "microbatches": 8},
    }  # fmt: skip
    (runs / "plan.json").write_text(json.dumps([entry]))
    assert main(["report", "out", "--plan", "plan.json"]) == 0
    assert "By the plan plan.json a step takes 20 ms" in capsys.readouterr().out


def test_scaling(capsys):
    assert main(["report", "--scaling", "one", "two"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("two\n") and "Throughput by ranks" in out and "most is lost to reduce" in out
    assert main(["report", "one", "--json", "--scaling", "one", "two"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"] == "one" and len(document["scaling"]["runs"]) == 2


@pytest.mark.parametrize(
    ("folder", "arguments", "code"),
    [
        ("out", ["--fail-on", "LastPartitionHeavy"], 3),
        ("out", ["--fail-on", "lastpartitionheavy"], 3),
        ("out", ["--fail-on", "warning"], 3),
        ("out", ["--fail-on", "DataWait"], 0),
        ("out", ["--fail-on", "DataWait", "--fail-on", "warning"], 3),
        ("clean", ["--fail-on", "warning"], 0),
        ("clean", ["--fail-on", "critical"], 0),
        ("clean", [], 0),
    ],
)
def test_fail_on(folder: str, arguments: list[str], code: int, capsys):
    assert main(["report", folder, *arguments]) == code
    assert ("--fail-on: LastPartitionHeavy (" in capsys.readouterr().err) == (code == 3)


def test_a_rule_in_the_working_folder_is_found(runs: Path, monkeypatch):
    monkeypatch.setattr(
        "sys.path", ["/a/folder/of/programs", *(path for path in sys.path if path != str(runs))]
    )
    (runs / "rules_of_this_test.py").write_text(f"from {__name__} import ManySteps\n")
    assert main(["report", "clean", "--rules", "rules_of_this_test:ManySteps"]) == 0
    sys.modules.pop("rules_of_this_test")


def test_rules_of_ones_own_and_their_parameters(capsys):
    mine = f"{__name__}:ManySteps"
    assert main(["report", "clean", "--rules", mine, "--fail-on", "ManySteps"]) == 3
    assert "WARNING ManySteps: 20 steps." in capsys.readouterr().out
    arguments = ["report", "clean", "--rules", mine, "--set", "ManySteps_most=100", "--fail-on", "ManySteps"]
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no folder is given: write for example weft report out"),
        (["--scaling", "one"], "--scaling compares runs: give two folders or more"),
        (["--scaling", "one", "one"], "scaling is seen in runs on different numbers of ranks"),
        (["out", "--step", "99"], "step 99 was not recorded: the nearest that was is 20, of 20 steps"),
        (["nowhere"], "nowhere holds no recording"),
        (
            ["out", "--fail-on", "DataWaits"],
            '--fail-on "DataWaits": there is no such rule; did you mean "DataWait"?',
        ),
        (["out", "--fail-on", "x" * 9], "write warning, critical, or the name of a rule"),
        (["out", "--plan", "nowhere.json"], "nowhere.json"),
        (
            ["out", "--plan", "other.json"],
            'other.json has no division like what ran, 4 ranks with "partitions": 4',
        ),
        (["out", "--plan", "broken.json"], "broken.json: this is not a plan"),
        (["out", "--set", "DataWait_warm=1"], 'DataWait has no parameter "warm"'),
        (["out", "--rules", "json"], '"json" names no rule: write module:Class'),
        (
            ["out", "--html", "no/folder/x.html"],
            "no/folder/x.html cannot be written: No such file or directory",
        ),
    ],
)
def test_mistakes(arguments: list[str], text: str, runs: Path, capsys):
    (runs / "other.json").write_text("[]")
    (runs / "broken.json").write_text("{")
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft report: error: ") and text in error


def test_a_page_appears_whole_or_not_at_all(runs: Path, monkeypatch, capsys):
    folder = runs / "out"
    assert write_page(folder) == folder / "report.html"
    assert sorted(each.name for each in folder.iterdir()) == ["report.html"]
    before = (folder / "report.html").read_text()

    def half(path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(command.UsageError, match="report.html cannot be written: No space left"):
        write_page(folder)
    assert main(["report", "out", "--html"]) == 2
    assert "out/report.html cannot be written: No space left" in capsys.readouterr().err
    assert (folder / "report.html").read_text() == before, "the page before stays"
    assert sorted(each.name for each in folder.iterdir()) == ["report.html"]


def test_a_real_recording_of_spans_only(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.undo()
    folder = tmp_path / "recording"
    for rank in range(2):
        recorder = Recorder.open(folder, rank, 2)
        for step in range(1, 12):
            recorder.add("F", step, 0, 10.0 * step, 10.0 * step + 1)
            recorder.add("B", step, 0, 10.0 * step + 1, 10.0 * step + 3)
            recorder.add("step", step, -1, 10.0 * step, 10.0 * step + 4)
        recorder.close()
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("recording\n") and "rank 1" in out
    assert write_page(folder).read_text().count("<section") >= 4


def test_traces_of_torch_profiler(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.undo()
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        event = {"ph": "X", "pid": 1, "tid": 1, "cat": "user_annotation"}
        events = [
            {**event, "name": name, "ts": 1e6 * step + at, "dur": long}
            for step in range(1, 12)
            for name, at, long in ((f"ProfilerStep#{step}", 0, 1e6), (f"{rank}F0", 1000, 500_000))
        ]
        trace = {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("traces\n") and re.search(r"^forward +500\.0 \(50\.0%\) +500\.0", out, re.M)
