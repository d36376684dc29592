"""Which recorded steps count as training steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.report.run.reports import report
from weft.analysis.analysis import Analysis
from weft.analysis.run import Run
from weft.report.run.text import run_text
from weft.rules import RULES, Status, judge
from weft.timeline import Span, Timeline


def test_what_lies_before_the_first_step_is_no_step():
    run = Recorded(partitions=2, steps=4).run()
    before = Timeline([Span(0, "collector", -1, -1.0, -0.5, step=0)])
    assert Analysis(replace(run, timeline=run.timeline.merged(before))).training_steps == {2, 3, 4}


def cut_after_first_step(made: Recorded, rank: int) -> Run:
    """The file of a rank ends with its first step."""
    run = made.run()
    kept = [span for span in run.timeline.spans if span.rank != rank or span.step == 1]
    return replace(run, timeline=Timeline(kept))


def test_a_rank_without_a_usual_step_is_in_no_figure_of_one():
    made = Recorded(partitions=2, replicas=2, first_s=500.0)
    analysis = Analysis(cut_after_first_step(made, 3))
    assert set(analysis.typical) == {0, 1, 2}
    assert analysis.step_s == pytest.approx(Analysis(made.run()).step_s)
    text = run_text(report(analysis.run))
    assert "ranks without a usual step, in no figure of one  3" in text


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_of_first_steps_has_no_usual_step(steps: int):
    """That of two steps only evaluated in the second."""
    values = {"step_values": lambda rank, step: {"evaluates": step > 1}}
    analysis = Analysis(Recorded(partitions=2, steps=steps, first_s=500.0, **values).run())
    assert (analysis.typical, analysis.step_s, analysis.what_if.changes) == ({}, 0.0, ())
    assert "usual step, with what lies between  there is none" in run_text(report(analysis.run))
    found = judge(RULES, analysis)
    assert {each.status for each in found}.isdisjoint({Status.ERROR, Status.WARNING, Status.CRITICAL})
