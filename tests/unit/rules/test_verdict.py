"""Which finding comes first, and what stands under it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.rules.rule import Finding, Rule, Status, judge
from weft.rules.table import RULES
from weft.rules.verdict import explain, verdict

ERROR, CRITICAL, WARNING, INFO, PASS = (
    Status.ERROR, Status.CRITICAL, Status.WARNING, Status.INFO, Status.PASS,
)  # fmt: skip


def of(made: Recorded):
    return verdict(judge(RULES, Analysis(made.run())))


def test_a_clean_run_says_so():
    found = of(Recorded(microbatches=32))
    assert (found.status, found.finding) == (PASS, None)
    assert found.text.startswith("Nothing is wrong: 14 rules found no fault")
    assert len(found.under) == len(RULES)


def test_a_run_that_says_too_little():
    found = of(Recorded(steps=2, settings={}))
    assert found.status in (PASS, Status.NOT_ENOUGH_DATA)
    assert verdict([Finding("A", Status.NOT_ENOUGH_DATA)]).text == "The run has too little to say."


def test_a_rule_that_failed_is_told_and_shown_first():
    found = verdict([Finding("A", PASS), Finding("B", ERROR, "ValueError: x")], ())
    assert found.text.endswith("1 rules failed: B.")
    assert [each.rule for each in found.under] == ["B", "A"]


def test_consequences_stand_under_their_cause_and_are_no_faults_of_their_own():
    found = of(Recorded(forward_s=[1, 1, 1, 1.3], backward_s=[2, 2, 2, 2.6]))
    assert found.finding is not None and found.finding.rule == "LastPartitionHeavy"
    assert found.text.startswith("LastPartitionHeavy: the last partition works 30.0 % longer")
    under = [(each.rule, each.explained_by) for each in found.under if each.status in (WARNING, CRITICAL)]
    assert sorted(under[:2]) == [
        ("PartitionImbalance", "LastPartitionHeavy"), ("PipelineBubble", "LastPartitionHeavy"),
    ]  # fmt: skip
    assert under[2] == ("MicrobatchesTooFew", "")


def test_the_first_cause_of_a_chain_is_named():
    @dataclass(frozen=True)
    class A(Rule):
        explains = ("B",)

        def evaluate(self, analysis: Analysis) -> Finding:
            return self.passed()

    class B(A):
        explains = ("C",)

    class C(A):
        explains = ()

    findings = [Finding("C", CRITICAL), Finding("B", CRITICAL), Finding("A", WARNING)]
    explained = explain(findings, [A(), B(), C()])
    assert [(each.explained_by, each.status) for each in explained] == [
        ("A", WARNING), ("A", WARNING), ("", WARNING),
    ]  # fmt: skip
    without = explain([*findings[:2], Finding("A", PASS)], [A(), B(), C()])
    assert [each.explained_by for each in without] == ["B", "", ""]


def test_the_order_is_what_is_lost_then_status_then_gain():
    @dataclass(frozen=True)
    class Lost(Rule):
        loses_run = True

        def evaluate(self, analysis: Analysis) -> Finding:
            return self.passed()

    findings = [
        Finding("Priceless", CRITICAL),
        Finding("Small", CRITICAL, gain=0.1),
        Finding("Unknown", WARNING),
        Finding("Large", WARNING, gain=0.3),
        Finding("Lost", CRITICAL),
        Finding("AsSmall", WARNING, gain=0.1),
    ]
    found = verdict(findings, [Lost()])
    order = [each.rule for each in (found.finding, *found.under) if each]
    assert order == ["Lost", "Small", "Priceless", "Large", "AsSmall", "Unknown"]
    warned = verdict([replace(findings[4], status=WARNING), findings[1]], [Lost()])
    assert warned.finding == findings[1]  # it may be lost later


def test_what_loses_a_run():
    losing = {rule.name for rule in RULES if rule.loses_run}
    assert losing == {"JobFailed", "LossNotFinite", "MemoryLeak", "MemoryHeadroom", "RecordingIncomplete"}


def test_a_gain_that_is_not_known_is_no_lost_run():
    """Nobody knows what the rank that is slow costs; the pipeline is worth mending first."""
    slow = Finding("StragglerRank", CRITICAL, "slow")
    few = Finding("MicrobatchesTooFew", CRITICAL, "few", gain=0.3)
    assert verdict([slow, few]).finding == few
    assert verdict([few, Finding("MemoryHeadroom", CRITICAL, "full")]).finding.rule == "MemoryHeadroom"  # type: ignore[union-attr]


def test_the_gain_is_told():
    assert verdict([Finding("A", WARNING, "it is slow", gain=0.25)], ()).text == (
        "A: it is slow. Mending it is expected to save 25 % of a step."
    )


def test_a_cause_weighs_what_it_explains():
    """Else what takes most of a step would stand under a cause of unknown price, behind all others."""
    heavy = Finding("CPUBottleneck", CRITICAL, "host", gain=0.39)
    other = Finding("OtherProcesses", WARNING, "others")
    small = Finding("TensorParallelExposed", WARNING, "sums", gain=0.05)
    told = verdict([small, other, heavy])
    assert [each.rule for each in told.findings] == [
        "OtherProcesses",
        "CPUBottleneck",
        "TensorParallelExposed",
    ]


def test_the_line_that_gains_most_is_told_first():
    slow = Finding("StragglerRank", CRITICAL, "rank 1 is slow", advice=("look at it",), gain=0.05)
    few = Finding("MicrobatchesTooFew", WARNING, "few", advice=('cut it: `"microbatches": 16`',), gain=0.3)
    vague = Finding("DataWait", WARNING, "waits", advice=("read faster",), gain=0.4)
    told = verdict([slow, vague, few])
    assert told.text.endswith(
        'Most is gained by one line of MicrobatchesTooFew: cut it: `"microbatches": 16` (30 % of a step).'
    )
    assert "one line" not in verdict([few, vague]).text  # it is the first finding's
    assert "one line" not in verdict([slow, vague]).text
    general = Finding("CPUBottleneck", WARNING, "host", advice=("take out `.item()` and `print`",), gain=0.9)
    assert "one line" not in verdict([slow, general]).text, "that is no line to write"
