"""What the timeline of the page shows, and the ideal above it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from tests.unit.report.run.reports import MS, made, report
from weft.analysis.analysis import Analysis
from weft.report.run.lanes import ideal_step, lanes


@pytest.mark.parametrize(
    ("more", "step_s", "idle"),
    [
        ({}, 33.0, 3 / 11),
        ({"slow": {3: 1.3}, "transfer_s": 0.05}, 11 * 3.225, 3 / 11),
        ({"microbatches": 32}, 105.0, 3 / 35),
    ],
)
def test_the_ideal_is_the_schedule_with_equal_partitions(more: dict, step_s: float, idle: float):
    ideal = ideal_step(
        Analysis(made(**{"forward_s": 1.0, "backward_s": 2.0, "slow": {}, "transfer_s": 0.0, **more}))
    )
    assert ideal is not None and ideal.duration_s == pytest.approx(step_s)
    assert [ideal.idle_share(rank) for rank in ideal.ranks] == pytest.approx([idle] * 4)


def test_every_copy_of_the_model_has_its_ideal():
    ideal = ideal_step(Analysis(made(replicas=2)))
    assert ideal is not None and ideal.ranks == tuple(range(8))


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": "unheard of"},
        {"pipeline": "file"},
        {"partitions": 1},
        {"partitions": 10**9},
        {"microbatches": "many"},
        {"microbatches": 10**9},
        {"microbatches": 0},
    ],
)
def test_no_ideal_where_the_schedule_is_not_known(settings: dict):
    assert ideal_step(Analysis(made(settings=settings))) is None


def test_all_steps_are_there_if_they_fit():
    found = lanes(report(made()))
    ideal, recorded = found.data["timelines"]
    assert [step for step, _ in found.steps] == list(range(1, 21)) and len(ideal["moments"]) == 20
    assert found.note.startswith("All 20 recorded steps are here")
    assert any("usual" in text for _, text in found.steps)
    assert recorded["ranks"][0]["rank"] == 0 and ideal["name"].startswith("ideal")


def test_of_many_steps_those_that_explain_most():
    """At most so many spans; the first step, the outlier and the usual one are among them."""
    made_report = report(made(late={(10, 1): 5.0}, steps=60))
    found = lanes(made_report, 1000)
    shown = [step for step, _ in found.steps]
    assert {1, 10, made_report.usual_step} <= set(shown) and len(shown) < 10
    spans = sum(len(rank["spans"]["kind"]) for rank in found.data["timelines"][1]["ranks"])
    assert spans <= 1000 and f"{spans:,} of" in found.note
    assert dict(found.steps)[10].endswith("outlier")


def test_the_step_that_was_asked_for_is_there():
    found = lanes(report(made(steps=60), step=47), 1000)
    assert 47 in dict(found.steps) and found.data["first"] == found.first == 47


def test_messages_are_those_of_the_analysis():
    made_report = report(made())
    data = lanes(made_report).data
    columns = data["timelines"][1]["messages"]
    arrived = [tick * data["tick"] for tick in accumulate(columns["arrived"])]
    start_s = made_report.analysis.timeline.start_s
    messages = made_report.analysis.messages
    assert [(m.sender, m.receiver) for m in messages] == [
        *zip(columns["sender"], columns["receiver"], strict=True)
    ]
    assert arrived == pytest.approx([(m.arrived_s - start_s) * 1e9 for m in messages], abs=data["tick"])
    assert [tick * data["tick"] for tick in columns["taken"]] == pytest.approx(
        [0.05 * MS * 1e9] * len(messages), abs=2e3
    )


def test_a_timeline_without_steps_and_one_without_anything():
    run = made(steps=2)
    bare = replace(
        run, timeline=type(run.timeline)(replace(s, step=-1) for s in run.timeline.spans if s.kind != "step")
    )
    found = lanes(report(bare))
    assert found.steps == [] and "first" not in found.data
    empty = replace(run, timeline=type(run.timeline)(), facts={}, steps={})
    assert lanes(report(empty)).data["timelines"][0]["ranks"] == []
