import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weft.errors import FormatError, UsageError
from weft.timeline import KINDS, Span, Timeline

STEP = Timeline(
    [
        Span(1, "F", 0, 1.0, 2.0, stage=1),
        Span(0, "F", 0, 0.0, 1.0, stage=0),
        Span(0, "wait", 0, 1.0, 3.0),
        Span(1, "B", 0, 2.0, 3.0, stage=1, label="head"),
        Span(0, "B", 0, 3.0, 4.0, stage=0),
    ]
)


def test_shares():
    assert STEP.ranks == (0, 1)
    assert STEP.duration_s == 4.0
    assert [STEP.busy_s(rank) for rank in STEP.ranks] == [2.0, 2.0]
    assert STEP.idle_share(0) == 0.5
    assert STEP.bubble == 0.5


def test_spans_are_in_the_order_of_rank_and_start():
    assert [(span.rank, span.kind) for span in STEP.spans] == [
        (0, "F"),
        (0, "wait"),
        (0, "B"),
        (1, "F"),
        (1, "B"),
    ]
    assert STEP.spans[0].duration_s == 1.0


def test_overlapping_work_counts_once():
    timeline = Timeline([Span(0, "F", 0, 0, 4), Span(0, "F", 1, 1, 2), Span(0, "B", 0, 3, 6)])
    assert timeline.busy_s(0) == 6


def test_of_nothing():
    assert (Timeline().duration_s, Timeline().bubble, Timeline().ranks) == (0.0, 0.0, ())
    assert Timeline([Span(0, "F", 0, 1.0, 1.0)]).idle_share(0) == 0.0


def test_steps():
    timeline = Timeline(
        [Span(0, "F", 0, step, step + 0.5, step=step) for step in (3, 1, 2)] + [Span(1, "F", 0, 0, 1)]
    )
    assert timeline.steps == (1, 2, 3)
    assert [span.start_s for span in timeline.of_step(2).spans] == [2]
    with pytest.raises(UsageError, match="step 4 is not in this timeline, which has the steps 1 to 3"):
        timeline.of_step(4)
    for step in (1, 2, 3):
        assert Timeline.from_json(timeline.to_json()).of_step(step) == timeline.of_step(step)
    with pytest.raises(UsageError, match="step 0 is not in this timeline, which has no steps"):
        STEP.of_step(0)
    with pytest.raises(UsageError, match="which has step 3"):
        timeline.of_step(3).of_step(1)
    two = timeline.of_step(1).merged(timeline.of_step(3))
    with pytest.raises(UsageError, match="which has the steps 1, 3"):
        two.of_step(2)


def test_merged_and_shifted():
    later = STEP.shifted(10.0)
    assert (later.start_s, later.end_s) == (10.0, 14.0)
    assert STEP.merged(later).duration_s == 14.0
    assert STEP.merged(Timeline()) == STEP


spans = st.builds(
    lambda rank, kind, microbatch, start, length, stage, label, step: Span(
        rank, kind, microbatch, start, start + length, stage, label, step
    ),
    st.integers(0, 3),
    st.sampled_from(KINDS),
    st.integers(0, 9),
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(-1, 4),
    st.text(max_size=5),
    st.integers(-1, 2),
)


ROUNDED = [Span(0, "F", 0, 0.0, 1.6819660803075394), Span(0, "F", 0, 0.0, 66.14426014585077)]
"""Added up in turn they are longer than from the first start to the last end, by rounding."""


@given(st.lists(spans, max_size=8))
@example(ROUNDED)
def test_json_gives_the_same_timeline(drawn):
    timeline = Timeline(drawn)
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert all(0.0 <= timeline.idle_share(rank) <= 1.0 for rank in timeline.ranks)


def test_faulty_spans():
    with pytest.raises(FormatError, match='a span has the kind "X", known are F, B'):
        Timeline([Span(0, "X", 0, 0, 1)])
    with pytest.raises(FormatError, match="a span ends before it starts: Span"):
        Timeline([Span(0, "F", 0, 1, 0)])
    with pytest.raises(
        UsageError, match=r"rank 7 did nothing in this timeline, which has the ranks \(0, 1\)"
    ):
        STEP.busy_s(7)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ([0, "F"], r"\$.spans\[0\]: expected rank, kind, microbatch"),
        ([0, "X", 0, 0, 1, 0, ""], r"\$.spans\[0\]\[1\]: expected one of F, B"),
        ([0, "F", 0, "0", 1, 0, ""], r"\$.spans\[0\]\[3\]: expected a number"),
    ],
)
def test_faulty_json(record, text):
    with pytest.raises(FormatError, match=text):
        Timeline.from_json(json.dumps({"weft": "timeline", "version": 1, "spans": [record]}))
