"""A replay without a change is the recording, and changes of made runs give the steps that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.pipeline.simulated import numbers, simulated
from weft.analysis.pipeline.work import stages_of
from weft.analysis.replay import HOST
from weft.analysis.run import Facts, Run, Unit
from weft.analysis.whatif import Change
from weft.timeline import KINDS, WORK, Span, Timeline

MADE = {
    "plain": Recorded(),
    "transfers": Recorded(transfer_s=0.05),
    "a heavy end": Recorded(forward_s=[1, 1, 1, 1.3], backward_s=[2, 2, 2, 2.6]),
    "32 microbatches": Recorded(microbatches=32),
    "copies": Recorded(
        2, 4, 2, data_s=5, optimizer_s=3, reduce_s=2, host_s=0.5, transfer_s=0.25, slow={2: 1.5}
    ),
    "zero bubble": Recorded(3, 6, schedule="zb_h1", transfer_s=0.1),
    "two stages a rank": Recorded(1, 4),
    "one slow step": Recorded(late={(4, 2): 1.3}),
}


@pytest.mark.parametrize("name", MADE)
def test_a_replay_without_a_change_is_the_recording(name: str):
    found = Analysis(MADE[name].run()).what_if
    assert found.fidelity == pytest.approx(0.0, abs=1e-9)


def change(made: Recorded, name: str) -> Change:
    found = Analysis(made.run()).what_if.change(name)
    assert found is not None
    return found


def test_equal_partitions_have_the_mean_of_the_stages():
    found = change(MADE["a heavy end"], "equal partitions")
    assert found.step_s == pytest.approx(33 * (1 + 1 + 1 + 1.3) / 4, abs=1e-6)
    assert found.gain == pytest.approx(1 - 35.475 / 40.2, abs=1e-6)


def test_more_microbatches_leave_the_bubble_of_that_number():
    made = Recorded(microbatches=8)
    found = change(made, "microbatches")
    assert (found.line, found.step_s) == ('"microbatches": 32', pytest.approx(26.25))
    analysis = Analysis(made.run())
    present = simulated(
        analysis.replay,
        stages_of(analysis.replay, analysis.partitions, {}),
        analysis.partitions,
        "1f1b",
    )
    assert present is not None
    assert present.step(32).bubble == pytest.approx(3 / 35)
    assert present.unexplained == pytest.approx(0.0)


def test_python_between_actions_is_no_shorter_for_smaller_microbatches():
    spans = []
    for step in (1, 2, 3, 4):
        begin = 100.0 * step
        spans.append(Span(0, "step", -1, begin, begin + 90, step=step))
        for number, kind in enumerate("FFFFBBBB"):
            at = begin + 10 * number
            spans.append(Span(0, kind, number % 4, at, at + 4, 0, step=step))
    analysis = Analysis(Run("made", Timeline(spans)))
    stages = stages_of(analysis.replay, analysis.partitions, {})
    assert stages is not None
    assert stages.overhead_s[0] == pytest.approx(6 * 7 / 8)
    assert stages.costs(8)[0].forward_s == pytest.approx(2 + 6 * 7 / 8)


OVERHEAD = Recorded(  # 0.5 s of each pass are no unit's; rank 1 has a neighbour that makes all twice as long
    2, 16, forward_s=[1.5, 3], backward_s=[2.5, 5], settings={"measured_costs": True},
    units=(Unit("a", 0, 1.0, 2.0), Unit("b", 1, 1.0, 2.0)),
)  # fmt: skip


def test_what_passes_take_beyond_their_units_is_no_shorter_for_smaller_microbatches():
    present = Analysis(OVERHEAD.run()).simulated
    assert present is not None
    assert present.stages.inside_s == pytest.approx((0.5, 0.5))
    assert present.stages.costs(16)[0].forward_s == pytest.approx(1.5)
    assert present.stages.costs(32)[0].forward_s == pytest.approx(0.5 + 0.5)
    assert present.stages.costs(32)[0].weight_s == pytest.approx(0.5 + 0.25)
    assert present.stages.costs(8)[1].backward_s == pytest.approx(9.0 + 0.5)


@pytest.mark.parametrize(
    "made",
    [
        replace(OVERHEAD, settings={}),
        replace(OVERHEAD, units=OVERHEAD.units[:1]),
        replace(OVERHEAD, units=()),
    ],
)
def test_units_that_were_not_measured_say_nothing_of_passes(made: Recorded):
    present = Analysis(made.run()).simulated
    assert present is not None and present.stages.inside_s == (0.0, 0.0)


def test_the_gain_of_any_number_of_microbatches():
    made = Recorded(microbatches=8)
    analysis = Analysis(made.run())
    found = change(made, "microbatches")
    assert analysis.gain_of_microbatches(found.microbatches) == found.gain
    assert analysis.gain_of_microbatches(4) == pytest.approx(1 - 42 / 33)
    assert analysis.gain_of_microbatches(128) is None  # nobody knows what so small passes take
    assert Analysis(Recorded(1, 4).run()).gain_of_microbatches(2) is None


def test_numbers_of_microbatches_divide_the_mini_batch():
    assert numbers(8, 24) == [4, 2, 1]
    made = Recorded(microbatches=8, step_values=lambda rank, step: {"samples": 8})
    assert Analysis(made.run()).what_if.change("microbatches") is None


def test_another_schedule_is_named_with_what_it_keeps():
    found = change(Recorded(4, 8), "schedule")
    assert found.line == '"pipeline": "zb_h1"'
    assert found.step_s == pytest.approx(27.0)  # (m + p - 1) * 3 - (p - 1) * 2 W of one second
    assert Analysis(Recorded(4, 8, schedule="zb_h1").run()).what_if.change("schedule") is None


def test_without_waiting_for_data_there_is_exactly_the_rest():
    made = Recorded(2, 2, 2, data_s=5, optimizer_s=3, reduce_s=2, host_s=0.5, transfer_s=0.25)
    assert change(made, "no data wait").step_s == pytest.approx(15.0)
    assert change(made, "no reduce").step_s == pytest.approx(18.0)
    assert change(made, "no host gaps").step_s == pytest.approx(19.5)
    assert change(made, "no transfers").step_s == pytest.approx(19.5)


def test_what_is_not_there_is_no_change():
    assert {each.name for each in Analysis(Recorded().run()).what_if.changes} == {
        "equal partitions", "microbatches", "schedule",
    }  # fmt: skip


def test_a_slow_copy_at_the_speed_of_the_others():
    made = Recorded(2, 4, 2, slow={2: 2.0}, reduce_s=1.0, optimizer_s=1.0)
    found = change(made, "straggler")
    assert (found.ranks, found.text) == ((2,), "rank 2 works at the speed of the other copies")
    assert found.step_s == pytest.approx(change_free(made).step_s)
    assert found.step_s == pytest.approx(5 * 3 + 2)
    assert change(made, "equal partitions").gain == pytest.approx(0.0)  # the copy is slow, not the partition


def change_free(made: Recorded) -> Analysis:
    return Analysis(replace(made, slow={}).run())


def test_a_rank_without_copies_is_compared_by_its_units():
    units = tuple(Unit(f"block{number}", number // 2, 1.0, 2.0) for number in range(8))
    made = Recorded(4, 8, slow={1: 1.5}, units=units)
    found = change(made, "straggler")
    assert (found.ranks, found.step_s) == ((1,), pytest.approx(33.0))
    assert found.text == "rank 1 works as fast as other ranks run their units"


def test_a_step_that_was_slow_once_is_no_straggler_but_often_is():
    assert Analysis(Recorded(late={(4, 2): 1.3}).run()).what_if.change("straggler") is None
    often = Recorded(steps=9, late={(step, 2): 1.4 for step in (2, 4, 6)})
    found = change(often, "straggler")
    assert (found.step_s, found.text) == (pytest.approx(33.0), "rank 2 works in all steps as fast as in most")


def test_where_all_ranks_are_slow_at_times_none_is_a_straggler():
    made = Recorded(2, 4, steps=9, late={(step, rank): 1.4 for step in (2, 4, 6) for rank in (0, 1)})
    assert Analysis(made.run()).what_if.change("straggler") is None


def test_gains_are_hidden_where_the_replay_does_not_meet_the_recording():
    made = Recorded(2, 4)
    analysis = Analysis(made.run())
    slow = analysis.replay.scaled(lambda node: 1.2 if node.kind in WORK else 1.0)
    analysis.__dict__["replay"] = slow
    found = analysis.what_if
    assert found.fidelity == pytest.approx(0.2)
    assert found.changes and all(each.gain is None for each in found.changes)


def test_a_simulation_that_does_not_meet_the_recording_hides_its_gains_only():
    made = Recorded(2, 4, 2, slow={2: 2.0})
    found = Analysis(made.run()).what_if
    assert found.gain("straggler") is not None
    assert found.gain("microbatches") is None and found.change("microbatches") is not None


def test_a_run_without_steps_has_no_changes():
    found = Analysis(Run("empty", Timeline())).what_if
    assert found.changes == () and found.fidelity != found.fidelity
    assert found.gain("no reduce") is None


def test_ranks_that_did_not_say_what_they_are_have_a_partition_each():
    made = Recorded(2, 4).run()
    assert Analysis(Run("made", made.timeline)).what_if.gain("equal partitions") == pytest.approx(0.0)
    alike = {rank: Facts(rank, 2) for rank in (0, 1)}
    assert Analysis(Run("made", made.timeline, alike)).partitions == {0: 0, 1: 1}


def test_a_rank_begins_when_the_first_one_has_begun():
    """The loader of rank 0 sleeps between steps; rank 1 waits for the step's begin, without a message."""
    spans = []
    for step in range(1, 7):
        begin = 10.0 * step
        spans += [
            Span(0, "step", -1, begin, begin + 4, step=step), Span(0, "F", 0, begin, begin + 4, 0, step=step),
            Span(0, "data", -1, begin + 4, begin + 10, step=step),
            Span(1, "step", -1, begin - 6, begin + 4, step=step), Span(1, "F", 0, begin, begin + 4, 1, step=step),
            Span(1, "wait", 0, begin - 6, begin, peer=0, step=step),
        ]  # fmt: skip
    found = Analysis(Run("made", Timeline(spans))).what_if
    assert found.fidelity == pytest.approx(0.0)
    assert found.change("no data wait").step_s == pytest.approx(4.0)  # type: ignore[union-attr]


def test_a_message_that_nobody_waited_for_can_still_be_late():
    """Rank 0 takes one second less than rank 1; twice as slow it is what rank 1 waits for."""
    analysis = Analysis(Recorded(2, 4, forward_s=[1, 2], backward_s=[1, 2]).run())
    slow = analysis.replay.scaled(lambda node: 4.0 if node.rank == 0 and node.kind in WORK else 1.0)
    other = Analysis(Recorded(2, 4, forward_s=[4, 2], backward_s=[4, 2]).run())
    assert slow.step_s == pytest.approx(other.step_s)


def test_the_timeline_of_a_replay_is_one_step():
    analysis = Analysis(MADE["a heavy end"].run())
    ideal = analysis.replay.without_transfers().timeline
    assert ideal.duration_s == pytest.approx(40.2)
    assert {span.kind for span in ideal.spans} == {"F", "B"}
    assert Analysis(Run("empty", Timeline())).replay.timeline.spans == ()


def test_many_steps_are_a_sample():
    made = Recorded(4, 32, steps=90, transfer_s=0.01)
    analysis = Analysis(made.run())
    assert 2 <= analysis.replay.steps < 89
    assert analysis.what_if.fidelity == pytest.approx(0.0, abs=1e-9)


RUNS = st.builds(
    Recorded,
    partitions=st.integers(1, 4), microbatches=st.integers(1, 5), replicas=st.integers(1, 3), steps=st.integers(2, 4),
    forward_s=st.floats(0.1, 3), backward_s=st.floats(0.1, 3), transfer_s=st.floats(0, 1),
    data_s=st.floats(0, 2), optimizer_s=st.floats(0, 2), reduce_s=st.floats(0, 2), host_s=st.floats(0, 2),
    slow=st.dictionaries(st.integers(0, 11), st.floats(1, 3), max_size=3),
    late=st.dictionaries(st.tuples(st.integers(2, 4), st.integers(0, 11)), st.floats(1, 1.4), max_size=3),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    RUNS, st.sets(st.sampled_from([*WORK, *HOST, "data", "optimizer", "reduce"])), st.booleans(),
    st.sets(st.integers(0, 11)),
)  # fmt: skip
def test_nothing_that_is_left_out_makes_a_step_longer(
    made: Recorded, kinds: set[str], moves: bool, ranks: set[int]
):
    replay = Analysis(made.run()).replay
    assert replay.step_s == pytest.approx(replay.measured_s)
    less = replay.scaled(lambda node: 0.0 if node.kind in kinds and node.rank in ranks else 1.0)
    less = less.without_transfers() if moves else less
    assert less.step_s <= replay.step_s * (1 + 1e-9)


ANY = st.builds(
    lambda rank, kind, start, length, step, peer, microbatch, stage: Span(
        rank, kind, microbatch, 20.0 * step + start, 20.0 * step + start + length, stage,
        f"value {'to' if kind == 'send' else 'from'} rank {peer}" if kind in ("send", "recv") else "",
        step=step, peer=peer if kind in ("send", "recv", "wait") else -1,
    ),
    st.integers(0, 2), st.sampled_from([kind for kind in KINDS if kind != "step"]), st.floats(0, 20), st.floats(0, 15),
    st.integers(0, 3), st.integers(-1, 2), st.integers(-1, 2), st.integers(-1, 2),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(ANY, max_size=40), st.integers(1, 3), st.booleans())
def test_any_spans_can_be_replayed(spans: list[Span], ranks: int, copies: bool):
    """Clocks that differ, messages that are lost, waits for nobody: there is an answer, if no gain."""
    steps = [
        Span(rank, "step", -1, 20.0 * step, 20.0 * step + 18, step=step)
        for rank in range(ranks)
        for step in range(4)
    ]
    facts = {
        rank: Facts(rank, 3, pp_rank=0 if copies else rank, rdp_rank=rank if copies else 0)
        for rank in range(3)
    }
    analysis = Analysis(Run("any", Timeline([*steps, *spans]), facts))
    found = analysis.what_if
    if analysis.replay.nodes:
        assert found.fidelity >= 0.0
        assert all(each.step_s >= -1e-6 for each in found.changes)
        assert analysis.replay.without(KINDS).without(HOST).step_s <= analysis.replay.step_s * (1 + 1e-9)
