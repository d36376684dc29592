"""Parameters of rules, and rules of one's own."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass

import pytest

from weft.analysis.analysis import Analysis
from weft.errors import ConfigError
from weft.rules import RULES, add, load_rule, rules
from weft.rules.configure import _added
from weft.rules.rule import Finding, Rule


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
