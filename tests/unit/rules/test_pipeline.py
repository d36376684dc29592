"""Rules about models that are split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.recordings import Recorded
from tests.unit.rules.cases import Case, ask, check, with_gaps
from weft.analysis.analysis import Analysis
from weft.analysis.run import Unit
from weft.rules.measures import ideal_bubble
from weft.rules.rule import Status
from weft.timeline import Timeline

WHOLE = Recorded(partitions=1, microbatches=1)
LONG = Recorded(microbatches=32)
LAST_HEAVY = Recorded(forward_s=[1, 1, 1, 1.3], backward_s=[2, 2, 2, 2.6])

CASES = {
    "PipelineBubble": Case(LAST_HEAVY, Status.WARNING, "35.8 %", LONG, WHOLE),
    "PartitionImbalance": Case(
        Recorded(forward_s=[1, 2, 1, 1], backward_s=[2, 4, 2, 2]), Status.CRITICAL, "partition 1 works 1.60 times",
        Recorded(forward_s=[1, 1.1, 1, 1], backward_s=[2, 2.2, 2, 2]), WHOLE,
    ),
    "LastPartitionHeavy": Case(
        LAST_HEAVY, Status.CRITICAL, "30.0 % longer", Recorded(forward_s=[1, 1.3, 1, 1.3]), WHOLE
    ),
    "TransferExposed": Case(
        Recorded(microbatches=32, transfer_s=0.5), Status.WARNING, "9.4 %",
        Recorded(microbatches=32, transfer_s=0.05), WHOLE,
    ),
    "TensorParallelExposed": Case(
        Recorded(microbatches=32, tensor=0.3), Status.WARNING, "27.4 %", Recorded(microbatches=32, tensor=0.15), WHOLE
    ),
    "MicrobatchesTooFew": Case(
        Recorded(microbatches=2), Status.CRITICAL, "with 2 microbatches for 4 partitions", LONG, WHOLE
    ),
    "MicrobatchesTooMany": Case(
        with_gaps(LONG.run(), 0.2), Status.WARNING, "20.0 % is Python", with_gaps(LONG.run(), 0.05), WHOLE
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_battery(name: str):
    check(name, CASES[name])


def test_how_many_microbatches_are_enough():
    assert '`"microbatches": 32`' in ask("MicrobatchesTooFew", Recorded(microbatches=4)).advice[0]
    few = Recorded(microbatches=4, step_values=lambda rank, step: {"samples": 4})
    assert "larger mini-batch" in ask("MicrobatchesTooFew", few).advice[0]


def test_a_number_of_microbatches_is_promised_what_it_gives_itself():
    made = Recorded(microbatches=4, step_values=lambda rank, step: {"samples": 16})
    found = ask("MicrobatchesTooFew", made)
    assert '`"microbatches": 16`' in found.advice[0]
    assert found.gain == Analysis(made.run()).gain_of_microbatches(16)
    few = Recorded(microbatches=4, step_values=lambda rank, step: {"samples": 4})
    assert ask("MicrobatchesTooFew", few).gain is None


SMALL = Recorded(  # 0.4 s of each pass of 0.6 s are no unit's
    partitions=2, microbatches=32, forward_s=0.6, backward_s=0.6, settings={"measured_costs": True},
    units=(Unit("a", 0, 0.2, 0.2), Unit("b", 1, 0.2, 0.2)),
)  # fmt: skip


def test_python_in_passes_counts_as_that_between_them():
    found = ask("MicrobatchesTooMany", SMALL)
    assert (found.status, "66.7 % is Python" in found.text) == (Status.CRITICAL, True)
    assert '`"microbatches": 8`' in found.advice[0]
    assert found.gain == Analysis(SMALL.run()).gain_of_microbatches(8)
    assert ask("MicrobatchesTooMany", replace(SMALL, settings={})).status is Status.PASS


def test_far_too_many_microbatches_become_the_number_that_saves_most():
    made = replace(SMALL, microbatches=128)
    found, analysis = ask("MicrobatchesTooMany", made), Analysis(made.run())
    (line,) = found.advice
    number = int(line.rpartition(": ")[2].rstrip("`"))
    assert number < 32 and found.gain == analysis.gain_of_microbatches(number)
    change = analysis.what_if.change("microbatches")
    assert change is not None and change.microbatches == number, "the table of changes has the same number"
    most = max(analysis.gain_of_microbatches(each) or 0.0 for each in (64, 32, 16, 8, 4))
    assert found.gain is not None and most > found.gain >= 0.9 * most


def test_fewer_microbatches_that_save_nothing_are_no_fault():
    """Python takes a sixth, but with half as many the pipeline of four stands still for as long."""
    made = replace(
        SMALL,
        partitions=4,
        forward_s=1.2,
        backward_s=1.2,
        units=tuple(Unit(str(n), n, 1.0, 1.0) for n in range(4)),
    )
    found = ask("MicrobatchesTooMany", made)
    assert found.status is Status.INFO and found.gain is not None and found.gain < 0.01


def test_a_rule_about_many_microbatches_promises_nothing_of_more():
    """The best number by simulation is a larger one."""
    many = Recorded(microbatches=32, step_values=lambda rank, step: {"samples": 128})
    made = with_gaps(many.run(), 0.02)
    analysis = Analysis(made)
    change = analysis.what_if.change("microbatches")
    assert change is not None and change.microbatches > 32
    assert ask("MicrobatchesTooMany", made, "MicrobatchesTooMany_warn=0.01").gain == 0.0


def test_many_microbatches_stay_where_fewer_would_stand_still():
    assert ask("MicrobatchesTooMany", with_gaps(Recorded(microbatches=8).run(), 0.2)).status is Status.PASS


def disturbed(made: Recorded, *shares: float, last: float = 3.0, preempted: int = 2000) -> Recorded:
    """Ranks that have their cores for such shares of their work, since other processes take them.

    A microbatch needs 3 seconds of processor time, and so many on the last partition.
    """

    def values(rank: int, step: int) -> dict[str, object]:
        own_s = made.microbatches * (last if rank == made.partitions - 1 else 3.0)
        return {"work_s": own_s, "cpu_s": own_s, "preempted": preempted if shares[rank] < 1 else 0}

    slow = {rank: 1 / share for rank, share in enumerate(shares)}
    return replace(made, slow=slow, step_values=values)


@pytest.mark.parametrize("name", ["PartitionImbalance", "LastPartitionHeavy"])
def test_partitions_are_compared_by_processor_time_where_others_take_the_cores(name):
    made = Recorded(partitions=2, microbatches=16)
    found = ask(name, disturbed(made, 1.0, 0.6))
    assert found.status is Status.PASS
    assert found.evidence["without its core, partition 1"] == "40.0 % of its work"
    heavy = replace(made, forward_s=[1, 2], backward_s=[2, 4])
    assert (
        ask(name, disturbed(heavy, 0.6, 1.0, last=6.0)).status is Status.CRITICAL
    )  # both take alike by the clock
    slept = ask(name, disturbed(made, 1.0, 0.6, preempted=0))
    assert slept.status in (Status.WARNING, Status.CRITICAL)


def test_microbatches_are_too_many_by_what_is_left_without_other_processes():
    """Other processes lengthen what Python seems to take; what they do not explain is a fault of its own."""
    lost = {"work_s": 96.0, "cpu_s": 0.75 * 96.0, "preempted": 5000}
    made = Recorded(microbatches=32, step_values=lambda *_: lost)
    assert ask("MicrobatchesTooMany", with_gaps(made.run(), 0.2)).status is Status.PASS
    found = ask("MicrobatchesTooMany", with_gaps(made.run(), 0.6))
    assert found.status is Status.CRITICAL
    assert found.evidence["without its core"] == "25.0 % of the work"


@pytest.mark.parametrize(
    ("pipeline", "bubble"),
    [("1f1b", 3 / 11), ("gpipe", 3 / 11), ("interleaved_1f1b", 3 / 19), ("auto", 3 / 11)],
)
def test_the_bubble_of_a_schedule(pipeline: str, bubble: float):
    analysis = Analysis(replace(Recorded(settings={"pipeline": pipeline, "chunks": 2}).run()))
    assert ideal_bubble(analysis, 8) == pytest.approx(bubble)


def test_a_schedule_that_splits_backward_passes_stands_still_less():
    analysis = Analysis(Recorded(settings={"pipeline": "zb_h1"}).run())
    assert ideal_bubble(analysis, 8) < 0.2


@pytest.mark.parametrize("name", ["PipelineBubble", "TransferExposed"])
def test_clocks_that_differ_tell_nothing_of_waits(name: str):
    run = Recorded(transfer_s=0.5).run()
    found = ask(name, replace(run, clock_error_s=0.2))
    assert (found.status, "may differ by 200 ms" in found.text) == (Status.NOT_ENOUGH_DATA, True)
    assert ask(name, replace(run, clock_error_s=0.05)).status is not Status.NOT_ENOUGH_DATA


def test_the_units_to_move_are_named():
    units = tuple(
        Unit(name, place, cost, 2 * cost)
        for name, place, cost in (("a", 0, 1.0), ("b.0", 1, 0.3), ("b.1", 1, 1.7), ("c", 2, 1.0))
    )
    made = Recorded(partitions=3, microbatches=32, forward_s=[1, 2, 1], backward_s=[2, 4, 2], units=units)
    assert ask("PartitionImbalance", made).advice == (
        'move b.0 from partition 1 to 0: `"auto_partition": False`, '
        '`weft.set_partition(model.get_submodule("a"), 0)`, `weft.set_partition(model.get_submodule("b.0"), 0)`, '
        '`weft.set_partition(model.get_submodule("b.1"), 1)`, `weft.set_partition(model.get_submodule("c"), 2)`',
    )
    by_hand = replace(made, settings={"auto_partition": False})
    assert ask("PartitionImbalance", by_hand).advice[0].endswith('`"auto_partition": True`')
    for_memory = replace(made, settings={"optimize": "memory"})
    assert ask("PartitionImbalance", for_memory).advice[0].endswith('`"optimize": "speed"`')


def test_no_unit_is_named_whose_move_would_only_move_the_fault():
    units = (Unit("a", 0, 1.0), Unit("b", 1, 3.0))
    made = Recorded(partitions=2, forward_s=[1, 3], backward_s=[2, 6], units=units)
    assert ask("LastPartitionHeavy", made).advice[0] == (
        "cut the modules of partition 1 into smaller ones: no split of these units is better balanced"
    )


def test_a_split_of_many_lines_is_told_without_some_of_them():
    units = tuple(Unit(f"u{number}", int(number > 3), 1.0, 2.0) for number in range(16))
    made = Recorded(partitions=2, microbatches=32, forward_s=[4, 12], backward_s=[8, 24], units=units)
    assert ask("PartitionImbalance", made).advice == ("move u4 to u7 from partition 1 to 0",)


@pytest.mark.parametrize("name", ["LastPartitionHeavy", "PartitionImbalance"])
def test_what_is_promised_is_what_the_advice_gives(name: str):
    """Equal partitions would save 12 %, but there is no unit of that size."""
    units = tuple(Unit(str(number), number // 2, 1.0 + number // 6, 2.0) for number in range(8))
    made = replace(LAST_HEAVY, forward_s=[1, 1, 1, 2], backward_s=[2, 2, 2, 4], units=units)
    analysis = Analysis(made.run())
    found, suggestion = ask(name, made), analysis.suggestion
    assert suggestion is not None and suggestion.moves
    assert found.gain == suggestion.gain != analysis.what_if.gain("equal partitions")
    assert ask(name, replace(made, units=())).gain is None


def test_what_even_equal_partitions_would_not_mend_is_no_fault():
    """The heavy partition works beside a wait for data that is longer."""
    made = replace(LAST_HEAVY, data_s=5000.0)
    found = ask("LastPartitionHeavy", made)
    assert (found.status, found.gain) == (Status.INFO, pytest.approx(0.00094, abs=1e-4))


@pytest.mark.parametrize(("degree", "hosts"), [(2, 1), (4, 1), (4, 2)])
def test_what_helps_depends_on_where_the_parts_are(degree: int, hosts: int):
    run = Recorded(
        partitions=1, microbatches=4, tensor=0.5, settings={"tensor_parallel_degree": degree}
    ).run()
    facts = {
        rank: replace(run.facts[0], rank=rank, ranks=degree, host=f"node{rank % hosts}")
        for rank in range(degree)
    }
    timeline = Timeline(replace(span, rank=rank) for rank in facts for span in run.timeline.spans)
    found = ask("TensorParallelExposed", replace(run, facts=facts, timeline=timeline))
    assert (found.status, found.evidence["hosts of a team"]) == (Status.CRITICAL, hosts)
    advice = " ".join(found.advice)
    assert ("on one host" in advice, '"tensor_parallel_degree": 2' in advice) == (hosts > 1, degree > 2)
    assert '"tensor_parallel_degree": 1' in advice and found.gain == pytest.approx(0.5, abs=0.05)
