"""What holds for the table of all rules."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.recordings import Recorded
from tests.unit.rules import test_data, test_machine, test_pipeline, test_replicas, test_training
from weft.analysis.analysis import Analysis
from weft.analysis.run import Run
from weft.rules.rule import Status, judge
from weft.rules.table import RULES
from weft.timeline import Timeline

NAMES = [rule.name for rule in RULES]
BY_ROOM = {"data": test_data, "machine": test_machine, "pipeline": test_pipeline, "replicas": test_replicas}


def test_every_rule_is_in_the_battery_once():
    rooms = (*BY_ROOM.values(), test_training)
    assert sorted(NAMES) == sorted(name for room in rooms for name in room.CASES)


def test_every_rule_has_a_question_and_typed_parameters():
    for rule in RULES:
        assert rule.question.endswith("?"), rule.name
        assert {type(value) for value in rule.parameters.values()} <= {int, float}, rule.name


def test_what_rules_explain_is_there_and_has_no_circle():
    arrows = {rule.name: rule.explains for rule in RULES}
    assert {name for explained in arrows.values() for name in explained} <= set(NAMES)
    assert len([*TopologicalSorter(arrows).static_order()]) == len(NAMES)


def test_those_of_the_original_are_there():
    assert {
        "CPUBottleneck", "IOBottleneck", "LoadBalancing", "LowGPUUtilization", "GPUMemoryIncrease", "BatchSize",
        "Dataloader", "StepOutlier", "MaxInitializationTime", "OverallSystemUsage", "OverallFrameworkMetrics",
    } <= {*NAMES}  # fmt: skip


def test_no_rule_raises_on_runs_that_have_next_to_nothing():
    nothing = Run("nothing", Timeline())
    bare = Run("bare", Recorded(partitions=2).run().timeline)
    simulated = Run("simulated", Timeline(span for span in bare.timeline.spans if span.kind != "step"))
    for run in (nothing, bare, simulated):
        eager = [type(rule)() for rule in RULES]
        for rule in eager:
            type(rule).least_steps, least = 0, type(rule).least_steps
            try:
                (found,) = judge([rule], Analysis(run))
            finally:
                type(rule).least_steps = least
            assert found.status is not Status.ERROR, (run.name, found)
