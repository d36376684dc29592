"""Findings reach the script: each once, the causes only, and never an error of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest

import weft.torch as weft
from tests.recordings import Recorded
from tests.unit.cli.test_top import write
from weft.errors import UsageError
from weft.profiler.live.following import Judged
from weft.rules.rule import Finding, Rule, Status
from weft.session.findings import FindingsReporter

RUN = Recorded(partitions=2, microbatches=4, steps=12).run()
MILD, SEVERE = Finding("Slow", Status.WARNING, "slow"), Finding("Slow", Status.CRITICAL, "slower")


@dataclass(frozen=True)
class Says(Rule):
    """Says what it was told."""

    said: Finding = MILD

    def evaluate(self, analysis):
        return self.said


def told(folder, *findings: Finding, call=None) -> list[Finding]:
    """What comes of one look at the end."""
    write(folder, RUN)
    found: list[Finding] = []
    judged = Judged([Says(each) for each in findings], every_s=0)
    FindingsReporter(folder, call or found.append, judged, every_s=3600).close()
    return found


def test_a_finding_is_told_at_the_end(tmp_path):
    assert told(tmp_path, MILD) == [MILD]


def test_consequences_and_what_is_in_order_are_left_out(tmp_path):
    assert told(tmp_path, replace(SEVERE, explained_by="Cause"), Finding("Fine", Status.PASS)) == []


def test_each_finding_is_told_once_and_again_if_it_became_worse(tmp_path):
    reporter = FindingsReporter(tmp_path, (found := []).append, Judged([]), every_s=3600)
    for finding in (MILD, MILD, SEVERE, MILD, SEVERE):
        reporter._report(finding)
    reporter.close()
    assert found == [MILD, SEVERE]


def test_what_the_function_raises_is_logged(tmp_path, caplog):
    def fails(finding):
        raise ZeroDivisionError("mine")

    with caplog.at_level(logging.WARNING):
        told(tmp_path, MILD, call=fails)
    assert "on_finding: it failed" in caplog.text and "mine" in caplog.text


def test_without_a_recording_there_is_nothing_to_judge():
    with pytest.raises(UsageError, match="not initialised"):
        weft.on_finding(print)
    weft.init({})
    try:
        with pytest.raises(
            UsageError, match="there is none: weft run --record FOLDER, or the setting record"
        ):
            weft.on_finding(print)
    finally:
        weft.shutdown()


def test_in_a_job(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr("weft.profiler.live.following.RULES", [Says(MILD)])
    monkeypatch.setattr(Says, "least_steps", 1)
    found: list[Finding] = []
    weft.init({"record": str(tmp_path / "out")})
    try:
        with pytest.raises(UsageError, match="was given 5: give it a function"):
            weft.on_finding(5)
        weft.on_finding(found.append)
        model = weft.DistributedModel(torch.nn.Linear(4, 4))

        @weft.step
        def step(model, x):
            model.backward(model(x).sum())

        for _ in range(4):
            step(model, torch.ones(2, 4))
    finally:
        weft.shutdown()
    assert found == [MILD]
