"""The drawn step: as long as its formula says, and cut where it cannot be read."""

from __future__ import annotations

import re

import pytest

from tests.unit.report.plan.answers import LARGE, answered, single
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import memory_of
from weft.plan.parallelism.search import Plan
from weft.plan.parallelism.stage_costs import stage_costs
from weft.plan.parallelism.step import step_of
from weft.report.plan.pipeline import (
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_STAGES,
    Pipeline,
    drawn_size,
    pipeline,
)

MACHINES = parse_cluster("4x8xA100-80")


def drawn(division: Division, batch: int) -> tuple[Plan, Pipeline]:
    job = Job(LARGE, batch)
    plan = Plan(division, step_of(job, division, MACHINES), memory_of(job, division))
    found = pipeline(plan, stage_costs(job, MACHINES, division))
    assert found is not None
    return plan, found


@pytest.mark.parametrize(
    "division",
    [
        Division(data=8, pipeline=4),
        Division(data=8, pipeline=4, schedule="zb_h1"),
        Division(data=8, pipeline=4, schedule="interleaved_1f1b", chunks=2),
        Division(data=8, pipeline=4, schedule="zbv", chunks=2),
        Division(data=4, pipeline=8, schedule="gpipe"),
    ],
    ids=str,
)
def test_a_whole_step_is_as_long_as_its_formula(division):
    """Simulation and formula are two ways to the same step."""
    plan, found = drawn(division, 16 * division.data)
    assert found.step_s == pytest.approx(plan.seconds, rel=0.05)
    assert re.search("the bubble is .* of the step. Drawn is the whole step", found.note)
    assert len(found.lanes) == division.pipeline
    work = [box for lane in found.lanes for box in lane.boxes if box.part in "FBIW"]
    kinds = 3 if "W" in found.parts else 2
    assert len(work) == kinds * division.stages * 16


def test_boxes_follow_each_other():
    _, found = drawn(Division(data=8, pipeline=4, schedule="interleaved_1f1b", chunks=2), 128)
    for lane in found.lanes:
        ends = 0.0
        for box in sorted(lane.boxes, key=lambda box: box.start):
            assert box.start >= ends - 0.01 and box.width > 0
            ends = box.start + box.width
        assert ends <= 100.01 and {box.top for box in lane.boxes if box.part == "F"} == {0.0, 25.0}


@pytest.mark.parametrize(
    ("division", "batch", "size"),
    [
        (Division(data=1, pipeline=32), 640, (8, 16)),
        (Division(data=16, pipeline=2), 1024, (2, 16)),
        (Division(data=1, pipeline=32), 8, (8, 8)),
        (Division(data=4, pipeline=8, schedule="interleaved_1f1b", chunks=5), 256, (3, 15)),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_cut_and_said(division, batch, size):
    plan, found = drawn(division, batch)
    assert drawn_size(plan) == size and size[0] <= MOST_RANKS and size[1] <= MOST_MICROBATCHES
    assert len(found.lanes) == size[0]
    for few, many, what in (
        (size[0], division.pipeline, "ranks"),
        (size[1], plan.step.microbatches, "microbatches"),
    ):
        assert (f"{few} of {many} {what}" in found.note) == (few < many)
    assert f"bubble is {plan.step.bubble / plan.seconds:.1%}" in found.note


def test_stages_have_all_layers_and_the_head():
    job = Job(LARGE, 1024)
    for division in (
        Division(pipeline=32),
        Division(pipeline=8, chunks=5, schedule="interleaved_1f1b"),
        Division(pipeline=2),
    ):
        one = stage_costs(job, MACHINES, Division())[0]
        all_of_them = stage_costs(job, MACHINES, division)
        assert len(all_of_them) == division.stages
        assert sum(stage.forward_s for stage in all_of_them) == pytest.approx(one.forward_s)
        assert all(stage.backward_s == pytest.approx(stage.input_s + stage.weight_s) for stage in all_of_them)


def test_without_a_pipeline_there_is_no_timeline():
    found = single()
    best = found.search.best[0]
    assert pipeline(best, stage_costs(found.asked.job, found.asked.machines, best.division)) is None


@pytest.mark.parametrize("cluster", ["4x8xA100-80", "2x8xH100", "8xL4", "3x4xV100-32"])
def test_every_plan_that_is_found_can_be_drawn(cluster):
    found = answered(cluster, batch=96)
    asked = found.asked
    for plan in found.search.best:
        if plan.division.pipeline > 1:
            assert pipeline(plan, stage_costs(asked.job, asked.machines, plan.division)) is not None


@pytest.mark.parametrize(
    "division", [Division(pipeline=32), Division(pipeline=8, chunks=5, schedule="interleaved_1f1b")], ids=str
)
def test_a_pipeline_that_is_cut_ends_in_the_stage_with_the_head(division: Division):
    _, found = drawn(division, 640)
    costs = stage_costs(Job(LARGE, 640), MACHINES, division)
    forward = [box.width for box in found.lanes[-1].boxes if box.part == "F"]
    assert max(forward) * found.step_s / 100 == pytest.approx(costs[-1].forward_s, rel=0.01)
    assert costs[-1].forward_s not in [cost.forward_s for cost in costs[:MOST_STAGES]]
