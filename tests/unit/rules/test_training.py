"""Rules about the run itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Case, Made, ask, check, logging
from weft.analysis.analysis import Analysis
from weft.analysis.run import Failed, Run, ScriptLine, Step
from weft.rules.rule import Status, judge
from weft.rules.table import RULES
from weft.rules.verdict import verdict
from weft.timeline import Timeline

NAN, INF = float("nan"), float("inf")
QUIET = Recorded(partitions=2, microbatches=16, steps=40)


def started(seconds: float, steps: int = 8) -> Run:
    """A run whose processes began so long before the first step."""
    run = Recorded(partitions=2, steps=steps).run()
    facts = {rank: replace(each, start_s=-seconds, joined_s=-1.0) for rank, each in run.facts.items()}
    return replace(run, facts=facts)


def without_rank(rank: int) -> Run:
    """A run of four ranks, one of which left no files."""
    run = Recorded().run()
    kept = Timeline(span for span in run.timeline.spans if span.rank != rank)
    return replace(
        run,
        timeline=kept,
        facts={each: facts for each, facts in run.facts.items() if each != rank},
        steps={each: steps for each, steps in run.steps.items() if each != rank},
    )


def late(times: float, *steps: int) -> Made:
    return Recorded(partitions=2, steps=101, late={(step, 1): times for step in steps})


def failed(step: int) -> Run:
    return replace(
        Recorded(partitions=2).run(), failed=Failed("rank 1 on node (pid 7) was killed by SIGKILL", 1, step)
    )


def evaluating(every: int) -> Run:
    """A run that evaluates each so many steps."""
    made = Recorded(partitions=2, steps=60, step_values=lambda _, step: {"evaluates": step % every == 0})
    return made.run()


def scripted(*lines: ScriptLine) -> Run:
    """A run of 39 steps of 10 seconds after the first, in which lines of the script were seen."""
    steps = tuple(Step(number, 10.0 * number, 10.0) for number in range(1, 41))
    made = Recorded(partitions=2, steps=40).run()
    return replace(made, steps={0: steps}, script={0: lines})


CASES = {
    "JobFailed": Case(
        failed(5), Status.CRITICAL, "the job failed: rank 1 on node (pid 7) was killed by SIGKILL", Recorded(), None
    ),
    "EvaluationShare": Case(
        evaluating(2), Status.WARNING, "30 steps without a backward pass, after each 1 that train", evaluating(12),
        Recorded(),
    ),
    "ScriptBetweenSteps": Case(
        scripted(ScriptLine("/a/train.py", 47, "log.flush()", 60.0, 0.0), ScriptLine("/a/b.py", 1, "x", 0.0, 1.0)),
        Status.WARNING, "most of it at train.py:47 `log.flush()`: 1.54 s of each step, asleep",
        scripted(ScriptLine("/a/train.py", 47, "log.flush()", 0.0, 20.0)), Recorded(),
    ),
    "RecordingIncomplete": Case(
        without_rank(2), Status.CRITICAL, "nothing is recorded of rank 2, of 4 ranks", Recorded(), None
    ),
    "CollectorPauses": Case(
        Recorded(partitions=2, microbatches=16, pauses={3: ("collector", 5), 6: ("collector", 5)}), Status.WARNING,
        "2.7 %",
        Recorded(partitions=2, microbatches=16, pauses={3: ("collector", 1), 6: ("collector", 1)}), None,
    ),
    "CheckpointStall": Case(
        Recorded(partitions=2, microbatches=16, pauses={3: ("checkpoint", 100)}), Status.CRITICAL, "21.9 %",
        Recorded(partitions=2, microbatches=16, pauses={3: ("checkpoint", 10)}), Recorded(),
    ),
    "StepOutlier": Case(
        late(5, 50, 100), Status.WARNING, "2 of 98 steps take", late(1.3, 50, 100), Recorded(), Status.NOT_ENOUGH_DATA
    ),
    "MaxInitializationTime": Case(
        started(1500), Status.WARNING, "began after 1500 s", started(10), Recorded(), Status.NOT_ENOUGH_DATA
    ),
    "OverallFrameworkMetrics": Case(
        Recorded(), Status.INFO, "48.5 % is backward", None, Recorded(steps=3), Status.NOT_ENOUGH_DATA
    ),
    "LossNotFinite": Case(
        logging(lambda step: {"loss": NAN if step >= 17 else 1.0}), Status.CRITICAL, "the loss is nan since step 17",
        logging(lambda step: {"loss": 1e30, "other": NAN}), QUIET, Status.NOT_ENOUGH_DATA,
    ),
    "LossNotDecreasing": Case(
        logging(lambda step: {"loss": 1.0 + step / 100}), Status.WARNING, "the loss rose from",
        logging(lambda step: {"loss": 1.0 - step / 100}), QUIET, Status.NOT_ENOUGH_DATA,
    ),
    "VanishingGradient": Case(
        logging(lambda step: {"gradient_norm": 10.0 ** -step}), Status.WARNING, "fell to",
        logging(lambda step: {"gradient_norm": 1e-6}), QUIET, Status.NOT_ENOUGH_DATA,
    ),
    "ExplodingGradient": Case(
        logging(lambda step: {"gradient_norm": 1.5 ** step}), Status.WARNING, "norm grew from",
        logging(lambda step: {"gradient_norm": INF if step == 9 else 1.0 + step % 7}), QUIET, Status.NOT_ENOUGH_DATA,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_battery(name: str):
    check(name, CASES[name])


def test_a_single_pause_of_the_collector_is_no_fault():
    once = Recorded(partitions=2, microbatches=16, pauses={3: ("collector", 50)})
    assert ask("CollectorPauses", once).status is Status.PASS


def test_steps_without_spans_count_as_usual_ones():
    """Of a long run the spans of outliers are kept, and of few other steps."""
    pauses = dict.fromkeys((4, 6), ("checkpoint", 100.0))
    run = Recorded(partitions=2, microbatches=16, steps=40, pauses=pauses).run()
    kept = replace(run, timeline=Timeline(span for span in run.timeline.spans if span.step < 10))
    assert ask("CheckpointStall", run).evidence["share"] == "9.1 %"
    assert ask("CheckpointStall", kept).evidence["share"] == "9.1 %"
    thinned = replace(run, timeline=Timeline(span for span in run.timeline.spans if span.step not in pauses))
    assert ask("CheckpointStall", thinned).evidence == {"share": "9.1 %", "saves": 2}


def test_a_save_after_an_evaluation_counts():
    made = Recorded(
        partitions=2,
        microbatches=16,
        pauses={3: ("checkpoint", 100)},
        step_values=lambda _, s: {"evaluates": s == 3},
    )
    assert ask("CheckpointStall", made).status is Status.CRITICAL


def test_a_rank_may_come_later_while_the_job_runs():
    assert ask("RecordingIncomplete", replace(without_rank(2), complete=False)).status is Status.WARNING


def test_a_damaged_file_is_told():
    found = ask("RecordingIncomplete", replace(Recorded().run(), warnings=("rank1.spans ends in a piece",)))
    assert (found.status, found.text) == (Status.WARNING, "rank1.spans ends in a piece")


def test_a_start_that_is_a_large_part_of_the_run_is_worth_knowing():
    assert ask("MaxInitializationTime", started(200)).status is Status.INFO


def test_one_outlier_is_no_fault_and_what_grew_is_told():
    assert ask("StepOutlier", late(5, 50)).status is Status.PASS
    found = ask("StepOutlier", late(5, 50, 100))
    assert (found.steps, found.evidence["what takes longer in them"]) == ((50, 100), "backward")


def test_outliers_do_not_hide_each_other():
    """With a mean and a standard deviation none of them would count."""
    assert ask("StepOutlier", late(5, *range(10, 100, 4))).status is Status.CRITICAL


def test_the_time_of_an_evaluation_is_no_outlier():
    run = late(5, 50, 100).run()
    evaluating = {
        rank: tuple(replace(step, evaluates=step.step in (50, 100)) for step in own)
        for rank, own in run.steps.items()
    }
    assert ask("StepOutlier", replace(run, steps=evaluating)).status is Status.PASS


def test_the_only_value_is_the_loss():
    assert ask("LossNotFinite", logging(lambda step: {"mine": INF})).text == "the mine is inf since step 1"
    two = logging(lambda step: {"mine": INF, "other": 1.0})
    assert ask("LossNotFinite", two).status is Status.NOT_ENOUGH_DATA


def test_the_noise_of_a_loss_that_fell_is_no_rise():
    draw = random.Random(3)
    noisy = {step: 1.0 / min(step, 10) + 0.02 * draw.gauss(0, 1) for step in range(1, 401)}
    run = Recorded(
        partitions=1, microbatches=1, steps=400, step_values=lambda _, step: {"values": {"loss": noisy[step]}}
    )
    found = ask("LossNotDecreasing", run)
    assert float(str(found.evidence["last"])) > 1.05 * float(str(found.evidence["lowest"]))
    assert found.status is Status.PASS


def test_a_loss_that_stays_is_told():
    assert "does not fall" in ask("LossNotDecreasing", logging(lambda step: {"loss": 2.0})).text


def test_norms_that_are_often_not_finite():
    found = ask("ExplodingGradient", logging(lambda step: {"gradient_norm": INF if step % 4 == 0 else 1.0}))
    assert found.text == "the gradients' norm was not finite in 10 of 40 steps"


def test_the_step_with_the_lowest_loss_is_that_of_its_window():
    """35 values are three windows of ten, which begin with the sixth one; the second of them is the lowest."""
    made = replace(logging(lambda step: {"loss": 1.0 if 16 <= step <= 25 else 2.0}), steps=35)
    found = ask("LossNotDecreasing", made)
    assert (found.status, found.steps) == (Status.WARNING, (16, 35))


def test_what_explains_a_failed_job_is_the_job():
    run = replace(without_rank(2), failed=Failed("rank 2 on node (pid 7) was killed by SIGKILL", 2, 0))
    told = verdict(judge(RULES, Analysis(run)))
    assert told.finding is not None and told.finding.rule == "JobFailed"
    assert told.under[0].explained_by == "JobFailed"


def test_a_line_that_computes_is_told_so():
    found = ask("ScriptBetweenSteps", scripted(ScriptLine("/a/train.py", 9, "tokenise(x)", 1.0, 300.0)))
    assert found.status is Status.CRITICAL and "of each step, computing" in found.text
    assert any("DataLoader" in line for line in found.advice)


def test_how_seldom_to_evaluate_is_told():
    found = ask("EvaluationShare", evaluating(2))
    assert found.advice[0].startswith("evaluate after each 20 training steps instead of 1")
