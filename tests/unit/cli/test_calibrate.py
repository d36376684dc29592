"""`weft plan --calibrate`: what it prints and writes, and its mistakes. The figures: `tests/unit/analysis/plan`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recordings import Recorded
from weft.analysis.run import Run
from weft.cli.main import main
from weft.cli.plan import calibrate as command
from weft.errors import UsageError
from weft.machines.catalogue import cpu
from weft.machines.machine_file import host_from_json, host_to_json

MS = 1e-3
SIZES = [*"--layers 4 --hidden 256 --heads 4 --vocab 1000 --seq 128".split(), "--precision", "fp32"]
COMMON = {"partitions": 2, "forward_s": 50 * MS, "backward_s": 100 * MS, "optimizer_s": 40 * MS}
RUNS = {
    "out": lambda: Recorded(microbatches=4, transfer_s=MS, **COMMON).run("out"),
    "twice": lambda: Recorded(microbatches=2, **{**COMMON, "forward_s": 80 * MS}).run("twice"),
    "short": lambda: Recorded(microbatches=4, steps=1, **COMMON).run("short"),
    "unknown": lambda: Recorded(
        microbatches=4, step_values=lambda rank, step: {"samples": 0}, **COMMON
    ).run("unknown"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.json").write_text(host_to_json(cpu(1)))

    def read(path: Path) -> Run:
        if path.name not in RUNS:
            raise UsageError(f"there is no folder {path}")
        return RUNS[path.name]()

    monkeypatch.setattr(command, "read_run", read)
    return tmp_path


def told(capsys, *arguments: str) -> str:
    assert main(["plan", "--calibrate", *arguments, *SIZES]) == 0
    return capsys.readouterr().out


def off(text: str) -> list[tuple[float, float]]:
    found = re.findall(r"was off by ([-+.\d]+)%, it is off by ([-+.\d]+)% now", text)
    return [(abs(float(before)), abs(float(now))) for before, now in found]


def test_the_file_is_corrected_and_the_changes_are_told(folder: Path, capsys):
    text = told(capsys, "out", "--machine", "mine.json")
    assert text.startswith("out: data 1, pipeline 2, 1f1b, microbatch 8, 4 microbatches\n")
    assert "6 usual steps of " in text and text.endswith("mine.json has these figures now.\n")
    ((before, now),) = off(text)
    assert now < 10 < before
    row = re.search(r"work +([\d.]+) +600\.00 +600\.00", text)
    assert row is not None
    host = host_from_json((folder / "mine.json").read_text())
    share = host.accelerator.share["fp32"]
    assert re.search(rf"share of it, fp32 +0\.5 +{share:.3g}\n", text)
    again = told(capsys, "out", "--machine", "mine.json")
    assert off(again) == [(now, now)]


def test_without_a_file_nothing_is_written(folder: Path, capsys):
    text = told(capsys, "out", "--cluster", "1x2xcpu:1")
    assert "changed in cpu:1" in text and "has these figures now" not in text
    assert (folder / "mine.json").read_text() == host_to_json(cpu(1))


def test_of_another_machine_a_new_file_is_made(folder: Path, capsys):
    told(capsys, "out", "--cluster", "1xmine.json", "--machine", "new.json")
    assert (folder / "mine.json").read_text() == host_to_json(cpu(1))
    assert host_from_json((folder / "new.json").read_text()) != cpu(1)


def test_several_recordings(capsys):
    text = told(capsys, "out", "twice", "--machine", "mine.json")
    assert len(off(text)) == 2
    assert "out: data 1" in text and "\ntwice: data 1, pipeline 2, 1f1b, microbatch 16" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["out"], "--calibrate needs a machine to correct: --machine mine.json"),
        (["out", "--machine", "no.json"], '"no.json" cannot be read'),
        (["nowhere", "--machine", "mine.json"], "there is no folder nowhere"),
        (["short", "--machine", "mine.json"], "short has no usual step: record some more steps"),
        (["unknown", "--machine", "mine.json"], "unknown does not say how many samples a step has: give --global"),
        (["out", "--machine", "mine.json", "--global-batch", "7"], "4 microbatches cannot share 7 sequences"),
        (["out", "--machine", "mine.json", "--json", "--tokens", "5B"], "--tokens, --json can say nothing of that"),
        (["out", "--machine", "mine.json", "--measure", "x.json"], "--measure can say nothing of that: leave it out"),
        (["out", "--machine", "mine.json", "--precision", "bf16"], "cpu:1 has no products in bf16"),
        (["out", "--cluster", "1xcpu:1", "--machine", "no/x.json"], "no/x.json cannot be written"),
    ],
)  # fmt: skip
def test_mistakes(arguments: list[str], text: str, folder: Path, capsys):
    assert main(["plan", *SIZES, "--calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft plan: error: ") and text in error
    assert (folder / "mine.json").read_text() == host_to_json(cpu(1))


def test_the_file_alone_is_no_plan(capsys):
    assert main(["plan", *SIZES, "--machine", "mine.json"]) == 2
    assert "a plan takes it as --cluster 1xFILE.json" in capsys.readouterr().err
