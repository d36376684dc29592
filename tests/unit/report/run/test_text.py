"""The report as text and as JSON says what the analysis says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from tests.unit.report.run.reports import EXPECTED, MS, hostile, made, report
from weft.analysis.analysis import Analysis
from weft.analysis.compare import compare
from weft.analysis.scaling import scale
from weft.report.run.document import run_json
from weft.report.run.report import Report
from weft.report.run.text import run_text
from weft.rules.rule import Finding, Status
from weft.rules.verdict import Verdict


def test_the_verdict_comes_first_then_findings_then_figures():
    found = report(made())
    lines = run_text(found).splitlines()
    assert lines[0] == "made" and lines[1].startswith(
        found.verdict.status.value.upper() + ": LastPartitionHeavy: "
    )
    text = "\n".join(lines)
    order = [
        "LastPartitionHeavy",
        "PipelineBubble",
        "Each rank's usual step",
        "What would be gained",
        "Waiting in a usual step",
        "Quality of clock and data",
        "The run",
        "other rules found nothing",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_a_finding_has_its_evidence_advice_and_gain():
    finding = Finding(
        "Slow",
        Status.WARNING,
        "it is slow",
        {"time": 0.25, "what": "this"},
        ("write `x`",),
        0.125,
        (1, 2),
        (3,),
    )
    text = run_text(Report(Analysis(made()), Verdict("Slow: it is slow.", Status.WARNING, finding, ())))
    assert "WARNING Slow: It is slow. Expected to save 12.5% of a step.\n   -> write `x`\n" in text
    assert "   time: 0.25; what: this\n   on ranks 1, 2; step 3\n" in text


def test_rules_that_failed_and_consequences_are_told():
    failed = Finding("Mine", Status.ERROR, "ZeroDivisionError: division by zero")
    under = Finding("Under", Status.INFO, "so", explained_by="Slow")
    text = run_text(Report(Analysis(made()), Verdict("x", Status.PASS, None, (failed, under))))
    assert "ERROR Mine: ZeroDivisionError: division by zero." in text
    assert "INFO Under (a consequence of Slow): So." in text


def test_control_characters_do_not_reach_the_terminal():
    text = run_text(report(hostile()))
    assert text.replace("\n", "").isprintable() and "\\x1b[2J" in text


def test_the_json_has_the_figures():
    found = report(made(data_s=3 * MS))
    document = json.loads(run_json(found))
    analysis = found.analysis
    assert (document["weft"], document["version"], document["run"]) == ("report", 1, "made")
    assert document["verdict"]["rule"] == found.verdict.finding.rule
    assert document["findings"][0]["rule"] == found.verdict.finding.rule
    assert len(document["findings"]) == len(found.rules)
    for rank, parts in analysis.typical.items():
        assert document["parts_s"][str(rank)] == pytest.approx(parts._asdict())
    assert {(each["rank"], each["for"]): each["seconds"] for each in document["waits_s"]} == pytest.approx(
        analysis.waits
    )
    assert document["steps"]["period_s"] == pytest.approx(analysis.step_s)
    assert document["steps"]["outliers"] == [10] and document["comparison"] is None


def test_the_json_of_comparisons():
    first, second = (
        made(str(n), partitions=2, slow={}, replicas=n, reduce_s=n * MS, units=False) for n in (1, 2)
    )
    old, new = Analysis(first), Analysis(second)
    document = json.loads(run_json(report(second, comparison=compare(old, new), scaling=scale([old, new]))))
    assert document["comparison"]["cause"] == "reduce"
    assert document["comparison"]["settings"]["ranks"] == {"before": 2, "now": 4}
    assert [each["ranks"] for each in document["scaling"]["runs"]] == [2, 4]


def test_a_plan_is_told_in_words_and_in_json():
    found = report(made(planned=EXPECTED))
    text = " ".join(run_text(found).split())
    assert "By the job's own plan a step takes 33 ms; it took " in text
    assert "Most of that: backward pass of partition 3, planned 16 ms, measured 20.8 ms." in text
    plan = json.loads(run_json(found))["plan"]
    assert plan["text"] == found.plan.text and plan["source"] == "the job's own plan"
    assert plan["step_s"]["planned"] == 0.033
    assert plan["missed"] == plan["terms_s"][10]
    assert {name: plan["missed"][name] for name in ("what", "partition", "planned")} == {
        "what": "backward pass", "partition": 3, "planned": 0.016,
    }  # fmt: skip
    assert json.loads(run_json(report(made())))["plan"] is None


def test_what_is_not_finite_is_null():
    finding = Finding("Nan", Status.CRITICAL, "x", {"loss": math.nan, "list": (1, math.inf), "other": object})
    found = Report(
        Analysis(replace(made(), clock_error_s=math.inf)), Verdict("x", Status.CRITICAL, finding, ())
    )
    document = json.loads(run_json(found), parse_constant=pytest.fail)
    assert document["findings"][0]["evidence"]["list"] == [1, None] and document["clock_error_s"] is None
