"""Where the time went: the parts of each step add up to it, and equal what is known of made runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recordings import Recorded
from weft.analysis.analysis import Analysis
from weft.analysis.parts import Parts, Period, parts, periods
from weft.timeline import KINDS, Span, Timeline

ORACLES = {
    "8 microbatches": (Recorded(), 33.0, [3 / 11] * 4),
    "transfers": (Recorded(transfer_s=0.05), 33.8, [0.289941] * 4),
    "a heavy end": (
        Recorded(forward_s=[1, 1, 1, 1.3], backward_s=[2, 2, 2, 2.6]), 40.2, [0.402985, 0.402985, 0.402985, 0.223881],
    ),
    "32 microbatches": (Recorded(microbatches=32), 105.0, [3 / 35] * 4),
}  # fmt: skip


@pytest.mark.parametrize("name", ORACLES)
def test_the_idle_share_of_a_known_step(name: str):
    made, step_s, idle = ORACLES[name]
    analysis = Analysis(made.run())
    assert analysis.step_s == pytest.approx(step_s)
    found = [(each.bubble + each.transfer) / each.total for each in analysis.typical.values()]
    assert found == pytest.approx(idle, abs=1e-6)


def test_every_part_of_a_known_step():
    made = Recorded(
        partitions=2,
        microbatches=2,
        replicas=2,
        data_s=5,
        optimizer_s=3,
        reduce_s=2,
        host_s=0.5,
        transfer_s=0.25,
    )
    analysis = Analysis(made.run())
    first, last = analysis.typical[0], analysis.typical[1]
    assert (first.forward, first.backward, first.data, first.host) == pytest.approx((2, 4, 5, 0.5))
    # The step: F, message, F B F B of the last rank, message, B.
    assert first.bubble + first.transfer == pytest.approx(9.5 - 6)
    assert (last.optimizer, last.reduce, last.data, last.host) == pytest.approx((3, 2, 0, 0.5))
    assert last.warmup == pytest.approx(1.0)  # until the first message is sent
    assert last.transfer == pytest.approx(0.25)


def test_a_wait_is_a_transfer_from_when_the_message_was_ready():
    spans = [
        Span(0, "step", -1, 0.0, 10.0, step=1),
        Span(0, "wait", 0, 1.0, 5.0, label="for rank 1", step=1, peer=1),
        Span(0, "recv", 0, 4.5, 4.9, label="value from rank 1", step=1, peer=1),
        Span(1, "send", 0, 3.0, 4.6, label="value to rank 0", step=1, peer=0),
    ]
    (found,) = parts(Timeline(spans), 0).values()
    assert (found.transfer, found.bubble, found.host) == pytest.approx((2.0, 2.0, 6.0))


def test_what_lies_within_something_counts_for_itself():
    spans = [
        Span(0, "step", -1, 0.0, 10.0, step=1),
        Span(0, "F", 0, 1.0, 5.0, step=1),
        Span(0, "collector", -1, 2.0, 3.0, step=1),
        Span(0, "data", -1, 10.0, 12.0, step=1),
        Span(0, "step", -1, 12.0, 13.0, step=2),
    ]
    found = {period.step: value for period, value in parts(Timeline(spans), 0).items()}
    assert found[1] == Parts(forward=3.0, collector=1.0, data=2.0, host=6.0)
    assert found[2] == Parts(host=1.0)


def test_what_ranks_with_parts_of_a_tensor_exchange_is_no_work():
    spans = [
        Span(0, "step", -1, 0.0, 10.0, step=1),
        Span(0, "F", 0, 1.0, 4.0, step=1),
        Span(0, "tensor", -1, 3.0, 4.0, step=1),
        Span(0, "B", 0, 4.0, 9.0, step=1),
        Span(0, "tensor", -1, 5.0, 5.5, step=1),
        Span(0, "tensor", -1, 8.0, 8.5, step=1),
    ]
    (found,) = parts(Timeline(spans), 0).values()
    assert found == Parts(forward=2.0, backward=4.0, tensor=2.0, host=2.0)
    assert found.work == 6.0 and found.bubble == 0.0


def test_a_period_before_steps_that_were_not_recorded_ends_with_its_own_spans():
    spans = [
        Span(0, "step", -1, 0.0, 10.0, step=1),
        Span(0, "optimizer", -1, 10.0, 12.0, step=1),
        Span(0, "send", 0, 11.0, 15.0, label="value to rank 1", step=1, peer=1),
        Span(0, "step", -1, 30.0, 33.0, step=5),
    ]
    assert periods(Timeline(spans), 0) == [Period(1, 0.0, 12.0), Period(5, 30.0, 33.0)]
    assert parts(Timeline(spans), 0)[Period(1, 0.0, 12.0)] == Parts(host=10.0, optimizer=2.0)


SPANS = st.builds(
    lambda rank, kind, start, length, step, peer: Span(
        rank, kind, 0, start, start + length,
        label=f"value {'to' if kind == 'send' else 'from'} rank {peer}" if kind in ("send", "recv") else "",
        step=step, peer=peer if kind in ("send", "recv", "wait") else -1,
    ),
    st.integers(0, 2), st.sampled_from(KINDS), st.floats(0, 100), st.floats(0, 30),
    st.integers(0, 3), st.integers(0, 2),
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(SPANS, max_size=40))
def test_parts_add_up_to_their_periods(spans: list[Span]):
    timeline = Timeline(spans)
    for rank in timeline.ranks:
        found = (
            parts(timeline, rank)
            if any(s.kind not in ("send", "recv") for s in timeline.of_rank(rank))
            else {}
        )
        for period, each in found.items():
            assert each.total == pytest.approx(period.duration_s, abs=1e-6)
            assert min(each) >= 0.0
        if found:
            own = periods(timeline, rank)
            for one, two in zip(own, own[1:], strict=False):
                assert one.end_s == two.start_s or (one.end_s < two.start_s and two.step != one.step + 1)
