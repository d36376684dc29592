"""The pictures of a plan: places are those of the figures, and labels can be read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.report.plan.answers import nothing, usual
from weft.plan.parallelism.memory import Memory
from weft.report.plan.pictures import INTERVALS, SIDES, axis, labels, memory_bars, memory_rows, scatter


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_around_the_values(low, span):
    found = axis(low, low + span, "{:g}".format)
    close = 1e-6 * span + 1e-12 * low  # as near as numbers of that size are to each other
    assert found.low <= low + close and low + span <= found.high + close
    assert 2 <= len(found.ticks) <= INTERVALS + 1
    assert found.place(found.low) == 0 and found.place(found.high) == 100


def test_one_value_has_an_axis():
    assert axis(5.0, 5.0, "{:g}".format).low <= 5 < axis(5.0, 5.0, "{:g}".format).high
    assert axis(0.0, 0.0, "{:g}".format).high > 0


def test_points_are_where_their_figures_are():
    found = usual()
    picture = scatter(found.search, found.asked.limit_bytes)
    assert [point.kind for point in picture.points].count("best") == len(found.search.best)
    best = [point for point in picture.points if point.kind == "best"]
    for point, plan in zip(best, found.search.best, strict=True):
        assert point.x == pytest.approx(picture.across.place(plan.seconds), abs=0.01)
        assert point.y == pytest.approx(100 - picture.up.place(plan.memory.total / 2**30), abs=0.01)
        assert point.y > picture.limit, "what fits lies below the limit"
        assert str(plan.division) in point.tooltip
    steps = [point.x for point in best]
    assert steps == sorted(steps)
    named = {name for label in picture.labels for name in label.text.split(", ")}
    assert named == {*map(str, range(1, 11)), *found.search.of_kind}


def test_where_nothing_fits_there_are_no_points():
    found = nothing()
    assert scatter(found.search, found.asked.limit_bytes) is None
    assert [name for name, _ in memory_rows(found.search, [])] == ["nearest"]


@pytest.mark.parametrize("side", SIDES)
def test_labels_go_where_nothing_is(side):
    """Points around leave one side free."""
    around = {"after": (60, 50), "before": (40, 50), "above": (50, 44.5), "below": (50, 55.5)}
    rest = [(x, y, other) for other, (x, y) in around.items() if other != side]
    (label,) = [one for one in labels([(50.0, 50.0, "pipeline"), *rest]) if one.text == "pipeline"]
    assert label.side == side


def test_labels_stay_in_the_field():
    (label,) = labels([(99.0, 50.0, "pipeline")])
    assert label.side == "before"
    at_left = labels([(12.0, 50.0, "pipeline"), (21.0, 50.0, "1")])[0]
    assert at_left.side == "above"


def test_bars_add_up_to_the_memory():
    small, large = Memory(10.0, 20.0, 30.0, 40.0, 0.0, 0.0), Memory(100.0, 0.0, 0.0, 100.0, 0.0, 0.0)
    found = memory_bars([("small", small), ("large", large)], 400.0)
    assert [sum(piece.width for piece in bar.pieces) for bar in found.bars] == [25.0, 50.0]
    assert found.limit == 100.0 and found.parts == ["parameters", "gradients", "states", "activations"]
    assert [piece.start for piece in found.bars[0].pieces] == [0.0, 2.5, 7.5, 15.0]
    beyond = memory_bars([("large", large)], 50.0)
    assert beyond.limit == 25.0 and sum(piece.width for piece in beyond.bars[0].pieces) == 100.0
