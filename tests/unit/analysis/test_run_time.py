"""The whole run of a rank, by what it went into."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.analysis.run import Facts, Failed, Run, Sample, Step
from weft.analysis.run_time import run_times
from weft.timeline import Span, Timeline

STEPS = (
    Step(1, 10.0, 2.0, optimizer_s=0.5),
    Step(2, 13.0, 1.0, wait_s=0.25, optimizer_s=0.5, data_s=0.5, checkpoint_s=1.0),
    Step(3, 16.0, 1.0, evaluates=True),
    Step(4, 18.0, 1.0, evaluates=True),
    Step(5, 20.0, 1.0),
)


def run(*steps: Step, start_s: float = 0.0, joined_s: float = 4.0) -> Run:
    facts = Facts(0, 1, start_s=start_s, joined_s=joined_s)
    return Run("made", Timeline(), {0: facts}, {0: steps})


def test_parts_add_up_to_the_run():
    (found,) = run_times(run(*STEPS)).values()
    assert found._asdict() == {
        "start": 4.0, "load": 6.0, "first": 2.0, "train": 2.75, "idle": 0.25, "evaluate": 3.0, "data": 0.5,
        "checkpoint": 1.0, "host": 1.5, "lost": 0.0,
    }  # fmt: skip
    assert found.total == 21.0 and found.share("evaluate") == pytest.approx(3 / 21)


def test_a_start_that_nobody_told_counts_from_the_first_step():
    (found,) = run_times(replace(run(*STEPS), facts={})).values()
    assert (found.start, found.load, found.total) == (0.0, 0.0, 11.0)


def test_a_rank_without_steps_has_no_time():
    assert run_times(run()) == {}


def test_what_comes_after_the_last_step_of_a_job_that_failed_is_lost():
    spans = Timeline([Span(0, "F", 0, 22.0, 24.0, 0, step=6)])
    made = replace(run(*STEPS), timeline=spans, failed=Failed("rank 0 failed", 0, 6))
    (found,) = run_times(made).values()
    assert (found.lost, found.total) == (3.0, 24.0)
    (hung,) = run_times(replace(made, samples={"": (Sample(51.0, (0.0,)),)})).values()
    assert (hung.lost, hung.total) == (30.0, 51.0)
    (ended,) = run_times(replace(made, failed=None)).values()
    assert (ended.lost, ended.total) == (0.0, 21.0)
    (cut,) = run_times(replace(made, failed=None, complete=False)).values()
    assert cut.lost == 3.0
