"""Parameters as users write them, rules that users add, and findings that end a program."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from typing import ClassVar

import pytest

from weft.analysis.analysis import Analysis
from weft.cli import run as command
from weft.cli.main import main
from weft.cli.report import FAILED, exit_code
from weft.errors import ConfigError, UsageError
from weft.rules import RULES, add, load_rule, rules
from weft.rules.configure import _added, failing, wanted
from weft.rules.rule import Finding, Rule, Status


@dataclass(frozen=True)
class Mine(Rule):
    """Is it mine?"""

    yes: bool = True
    name_of_it: str = "x"

    def evaluate(self, analysis: Analysis) -> Finding:
        return self.passed()


def parameters(name: str, *texts: str) -> dict[str, object]:
    return next(rule for rule in rules(texts) if rule.name == name).parameters


def test_the_defaults():
    assert rules() == RULES


def test_a_mapping_and_texts_say_the_same():
    told = rules({"PipelineBubble": {"warn": 0.1}, "StepOutlier": {"n_outliers": 3}})
    assert told == rules(["PipelineBubble_warn=0.1", "StepOutlier_n_outliers=3"])
    assert told != RULES


def test_capitals_do_not_matter_and_types_stay():
    assert parameters("CPUBottleneck", "cpubottleneck_CPU_threshold=80")["cpu_threshold"] == 80.0
    assert type(parameters("StepOutlier", "StepOutlier_patience = 50")["patience"]) is int


def test_a_rule_has_parameters_of_every_type():
    (mine,) = [
        rule
        for rule in rules({"mine": {"yes": "False", "name_of_it": "y"}}, more=[Mine()])
        if rule.name == "Mine"
    ]
    assert mine == Mine(yes=False, name_of_it="y")


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (["PipelinBubble_warn=1"], 'there is no rule "PipelinBubble": did you mean "PipelineBubble"?'),
        (["PipelineBubble_warm=1"], 'PipelineBubble has no parameter "warm": did you mean "warn"?'),
        (["OverallSystemUsage_x=1"], "OverallSystemUsage has no parameter \"x\": it has none"),
        (["PipelineBubble"], '"PipelineBubble" is no parameter of a rule'),
        (["PipelineBubble_warn="], "write for example PipelineBubble_warn=0.1"),
        (["PipelineBubble_warn=few"], "PipelineBubble_warn is 'few': write a number from 0 on"),
        (["PipelineBubble_warn=nan"], "PipelineBubble_warn is 'nan'"),
        (["PipelineBubble_warn=-1"], "PipelineBubble_warn is '-1'"),
        (["StepOutlier_patience=2.5"], "StepOutlier_patience is '2.5': write a whole number from 0 on"),
        ({"StepOutlier": {"patience": True}}, "StepOutlier_patience is True"),
        ({"StepOutlier": 3}, 'the parameters of StepOutlier are 3: write {"StepOutlier": {"parameter": value}}'),
    ],
)  # fmt: skip
def test_what_is_refused(told, text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        rules(told)


def test_a_flag_is_true_or_false():
    with pytest.raises(ConfigError, match="Mine_yes is 'maybe': write true or false"):
        rules(["mine_yes=maybe"], more=[Mine()])


def test_a_rule_that_was_added_is_asked_and_takes_anothers_place(monkeypatch):
    monkeypatch.setattr("weft.rules.configure._added", [])
    add(Mine())
    add(Mine(yes=False))
    assert rules()[-1] == Mine(yes=False)
    assert len(rules()) == len(RULES) + 1
    with pytest.raises(ConfigError, match="is no rule: write a class"):
        add(Mine)  # type: ignore[arg-type]


def test_a_rule_by_its_path(monkeypatch):
    module = types.ModuleType("my_rules")
    module.Mine, module.mine, module.number = Mine, Mine(yes=False), 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_rules", module)
    assert load_rule("my_rules:Mine") == Mine()
    assert load_rule("my_rules:mine") == Mine(yes=False)
    for path, text in {
        "my_rules": "names no rule: write module:Class",
        "my_rules:Other": 'the rule "my_rules:Other" cannot be imported',
        "no_such_module:Rule": "No module named 'no_such_module'",
        "my_rules:number": '"my_rules:number" is no rule',
    }.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            load_rule(path)


def test_nothing_stays_added():
    assert _added == []


def test_an_older_name_is_known():
    with pytest.raises(ConfigError, match="LossNotFinite has no parameter"):
        rules(["explodingtensor_only_nan=true"])


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


TWO = (Heavy(), Fine())
FOUND = [Finding("Heavy", Status.WARNING), Finding("Fine", Status.INFO)]


@pytest.mark.parametrize(
    "names, found",
    [(["Heavy"], 1), (["OldHeavy"], 1), (["any"], 1), (["Fine"], 0), (["Fine", "Heavy"], 1), ([], 0)],
)
def test_findings_that_are_named(names, found):
    assert len(failing(FOUND, wanted(names, TWO))) == found


def test_what_is_no_finding_does_not_fail():
    for status in Status:
        found = failing([Finding("Heavy", status)], ["Heavy"])
        assert bool(found) == (status in (Status.WARNING, Status.CRITICAL))


def test_names_that_no_rule_has():
    assert wanted(["heavy", "OldHeavy", "any", "critical"], TWO) == ["Heavy", "Heavy", "any", "critical"]
    with pytest.raises(UsageError, match=r"there is no such rule; did you mean \"Heavy\"\?"):
        wanted(["Heavi"], TWO)
    with pytest.raises(
        UsageError, match="there is no such rule; write warning, critical, or the name of a rule"
    ):
        wanted(["x"], TWO)


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
    monkeypatch.setattr(command, "RULES", TWO)
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
    monkeypatch.setattr(command, "RULES", TWO)
    (tmp_path / "job.py").write_text("raise SystemExit(9)")
    given = [each.format(folder=tmp_path / "out") for each in options]
    assert main(["run", *given, str(tmp_path / "job.py")]) == 2
    assert told in capsys.readouterr().err


def test_a_recording_of_an_earlier_job_is_not_judged(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "RULES", TWO)
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
