"""Rules that a command line names, and the exit code of a job by what they find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from weft.cli import run as command
from weft.cli.main import main
from weft.cli.report import FAILED, exit_code
from weft.errors import UsageError
from weft.rules.failing import failing, wanted
from weft.rules.rule import Finding, Rule, Status


@dataclass(frozen=True)
class Heavy(Rule):
    """A part is heavy."""

    aliases: ClassVar[tuple[str, ...]] = ("OldHeavy",)
    least_steps: ClassVar[int] = 1
    status: Status = Status.WARNING

    def evaluate(self, analysis):
        return Finding("Heavy", self.status, "part 1 is\x1b[2J heavy")


@dataclass(frozen=True)
class Fine(Heavy):
    """Nothing is wrong."""

    aliases: ClassVar[tuple[str, ...]] = ()

    def evaluate(self, analysis):
        return self.passed()


RULES = (Heavy(), Fine())
FOUND = [Finding("Heavy", Status.WARNING), Finding("Fine", Status.INFO)]


@pytest.mark.parametrize(
    "names, found",
    [(["Heavy"], 1), (["OldHeavy"], 1), (["any"], 1), (["Fine"], 0), (["Fine", "Heavy"], 1), ([], 0)],
)
def test_findings_that_are_named(names, found):
    assert len(failing(FOUND, wanted(names, RULES))) == found


def test_what_is_no_finding_does_not_fail():
    for status in Status:
        found = failing([Finding("Heavy", status)], ["Heavy"])
        assert bool(found) == (status in (Status.WARNING, Status.CRITICAL))


def test_names_that_no_rule_has():
    assert wanted(["heavy", "OldHeavy", "any", "critical"], RULES) == ["Heavy", "Heavy", "any", "critical"]
    with pytest.raises(UsageError, match=r"there is no such rule; did you mean \"Heavy\"\?"):
        wanted(["Heavi"], RULES)
    with pytest.raises(
        UsageError, match="there is no such rule; write warning, critical, or the name of a rule"
    ):
        wanted(["x"], RULES)


JOB = """
import torch
import weft.torch as weft

weft.init({})
model = weft.DistributedModel(torch.nn.Linear(4, 4))

@weft.step
def step(model, x):
    model.backward(model(x).sum())

for _ in range(4):
    step(model, torch.ones(2, 4))
"""


@pytest.mark.parametrize("name, code", [("Heavy", FAILED), ("Fine", 0)])
def test_the_exit_code_of_a_job(tmp_path, monkeypatch, capfd, name, code):
    monkeypatch.setattr(command, "RULES", RULES)
    (tmp_path / "job.py").write_text(JOB)
    options = ["--record", str(tmp_path / "out"), "--fail-on", name]
    assert main(["run", *options, str(tmp_path / "job.py")]) == code
    told = "weft run: --fail-on: Heavy (warning): part 1 is\\x1b[2J heavy\n"
    assert (told in capfd.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    "options, told",
    [
        (["--fail-on", "Heavy"], "it records nothing: add --record FOLDER"),
        (
            ["--fail-on", "Heavy", "--engine", "mpirun"],
            "--fail-on is for ranks on this machine or by ssh, and not for mpirun",
        ),
        (["--fail-on", "Heavi", "--record", "{folder}"], 'did you mean "Heavy"?'),
    ],
)
def test_what_cannot_be_judged_is_told_before_anything_runs(tmp_path, monkeypatch, capsys, options, told):
    monkeypatch.setattr(command, "RULES", RULES)
    (tmp_path / "job.py").write_text("raise SystemExit(9)")
    given = [each.format(folder=tmp_path / "out") for each in options]
    assert main(["run", *given, str(tmp_path / "job.py")]) == 2
    assert told in capsys.readouterr().err


def test_a_recording_of_an_earlier_job_is_not_judged(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "RULES", RULES)
    (tmp_path / "job.py").write_text("")
    (tmp_path / "rank0.steps.jsonl").write_text("of an earlier job")
    assert main(["run", "--record", str(tmp_path), "--fail-on", "Heavy", str(tmp_path / "job.py")]) == 2
    assert "this job recorded nothing into" in capfd.readouterr().err


def test_what_could_not_be_judged_is_told(capsys):
    found = [Finding("Heavy", Status.NOT_ENOUGH_DATA, "3 steps are too few"), Finding("Fine", Status.PASS)]
    assert exit_code("report", ["Heavy", "Fine"], found, complete=True) == 0
    assert capsys.readouterr().err == "weft report: --fail-on: Heavy (not enough data): 3 steps are too few\n"
    assert exit_code("report", [], found, complete=False) == 0 and not capsys.readouterr().err
    assert exit_code("run", ["any"], [Finding("Heavy", Status.CRITICAL, "x")], complete=False) == FAILED
    assert capsys.readouterr().err.splitlines() == [
        "weft run: --fail-on: Heavy (critical): x",
        "weft run: --fail-on: the run has not come to its end, so only its beginning is judged",
    ]
