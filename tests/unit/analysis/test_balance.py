"""The suggested split has the smallest largest partition, by units that cost what was measured."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recordings import Recorded
from tests.unit.report.run.reports import report
from weft.analysis.analysis import Analysis
from weft.analysis.run import Unit
from weft.report.run import step_tables
from weft.rules.pipeline import LastPartitionHeavy
from weft.rules.rule import judge
from weft.timeline import WORK


def units(costs: list[float], places: list[int]) -> tuple[Unit, ...]:
    pairs = enumerate(zip(costs, places, strict=True))
    return tuple(Unit(f"block{number}", place, cost / 3, 2 * cost / 3) for number, (cost, place) in pairs)


def test_a_split_by_hand_that_is_uneven_is_mended():
    places = [0, 0, 1, 1, 1, 1, 1, 1]
    made = Recorded(2, 4, forward_s=[1, 3], backward_s=[2, 6], units=units([1.0] * 8, places))
    analysis = Analysis(made.run())
    found = analysis.suggestion
    assert found is not None
    assert [(move.unit, move.source, move.target) for move in found.moves] == [
        ("block2", 1, 0),
        ("block3", 1, 0),
    ]
    assert found.moves[0].line == 'weft.set_partition(model.get_submodule("block2"), 0)'
    assert found.text == "block2 to block3 from partition 1 to 0"
    assert found.lines == ('"auto_partition": False', *(mark.line for mark in found.marks))
    assert [(mark.unit, mark.target) for mark in found.marks] == [(f"block{n}", int(n > 3)) for n in range(8)]
    assert (found.before_s, found.after_s) == (pytest.approx((12.0, 36.0)), pytest.approx((24.0, 24.0)))
    assert found.step_s == pytest.approx(Analysis(Recorded(2, 4, forward_s=2, backward_s=4).run()).step_s)
    assert found.gain == pytest.approx(1 - found.step_s / analysis.step_s)
    assert analysis.what_if.gain("equal partitions") == pytest.approx(found.gain)


@pytest.mark.parametrize(
    "given_, line",
    [
        ({"auto_partition": False}, '"auto_partition": True'),
        ({"optimize": "memory"}, '"optimize": "speed"'),
        ({}, ""),
    ],
)
def test_the_line_that_makes_the_suggested_split(given_: dict[str, object], line: str):
    split = units([1.0] * 6, [0, 0, 1, 1, 1, 1])
    made = Recorded(2, 4, forward_s=[1, 2], backward_s=[2, 4], units=split, settings=given_)
    analysis = Analysis(made.run())
    found, suggestion = analysis.what_if.change("split"), analysis.suggestion
    assert found is not None and suggestion is not None
    assert (found.line, found.gain, found.step_s) == (line, suggestion.gain, suggestion.step_s)
    assert analysis.what_if.change("equal partitions").line == ""  # type: ignore[union-attr]


def test_where_modules_are_placed_by_hand_only_moves_are_written():
    split = units([1.0] * 6, [0, 0, 1, 1, 1, 1])
    made = Recorded(
        2, 4, forward_s=[1, 2], backward_s=[2, 4], units=split, settings={"auto_partition": False}
    )
    found = Analysis(made.run()).suggestion
    assert found is not None and found.marks == found.moves and len(found.moves) == 1


def test_ranks_find_another_order_for_another_split():
    """Beside the heavy partition others ran what was ready. Replayed in that order they would wait for each other."""
    split = units([1.0, 1.0, 1.8, 1.8, 1.8, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 1, 2, 2, 3, 3])
    made = Recorded(
        4, 32, forward_s=[2, 5.4, 2, 2], backward_s=[4, 10.8, 4, 4], units=split, ready_first=True
    )
    analysis = Analysis(made.run())
    suggestion = analysis.suggestion
    assert suggestion is not None
    work = [each / 32 for each in suggestion.after_s]
    moved = replace(made, forward_s=[each / 3 for each in work], backward_s=[2 * each / 3 for each in work])
    assert suggestion.step_s == pytest.approx(Analysis(moved.run()).step_s)
    equal = analysis.what_if.change("equal partitions")
    other = replace(made, forward_s=11.4 / 4, backward_s=22.8 / 4)
    assert equal is not None and equal.step_s == pytest.approx(Analysis(other.run()).step_s)


def test_the_work_of_a_partition_is_one_figure_everywhere():
    """Of three copies one is fast and one is slow."""
    split = units([1.0] * 6, [0, 0, 1, 1, 1, 1])
    made = Recorded(
        2,
        4,
        3,
        forward_s=[1, 2],
        backward_s=[2, 4],
        units=split,
        slow={1: 0.9, 3: 1.0, 5: 1.2},
        optimizer_s=0.5,
    )
    analysis = Analysis(made.run())
    assert analysis.partition_work == pytest.approx({0: 12.0, 1: 24.0})
    assert analysis.suggestion is not None and analysis.suggestion.before_s == pytest.approx((12.0, 24.0))
    (finding,) = judge([LastPartitionHeavy()], analysis)
    assert finding.text == "the last partition works 100.0 % longer than every other one"
    shown = {row[0]: row[3] for row in step_tables.balance(report(made.run())).rows}
    assert shown == {"partition 0": "12000", "partition 1": "24000"}


def test_no_gain_is_told_where_the_replay_is_not_faithful():
    made = Recorded(2, 4, forward_s=[1, 2], backward_s=[2, 4], units=units([1.0] * 6, [0, 0, 1, 1, 1, 1]))
    analysis = Analysis(made.run())
    analysis.__dict__["replay"] = analysis.replay.scaled(lambda node: 1.2 if node.kind in WORK else 1.0)
    assert analysis.suggestion is not None and analysis.suggestion.gain is None


def test_a_balanced_split_stays_as_it_is():
    made = Recorded(2, 4, units=units([1.0] * 4, [0, 0, 1, 1]))
    found = Analysis(made.run()).suggestion
    assert found is not None and found.moves == () and found.gain == pytest.approx(0.0)
    assert found.text == "no split of these units is better balanced"


def test_units_are_worth_what_their_partition_took():
    """By the units alone the split is even; but those of partition 1 took three times as long."""
    made = Recorded(2, 4, forward_s=[1, 3], backward_s=[2, 6], units=units([1.0] * 8, [0] * 4 + [1] * 4))
    found = Analysis(made.run()).suggestion
    assert found is not None and [move.unit for move in found.moves] == ["block4"]
    assert max(found.after_s) == pytest.approx(27.0) and sum(found.after_s) == pytest.approx(48.0)


@pytest.mark.parametrize(
    "split",
    [(), units([1.0, 1.0], [0, 0]), units([1.0], [0]), (*units([1.0] * 2, [0, 1]), Unit("block0", 1))],
)
def test_nothing_is_suggested_where_units_do_not_say_enough(split: tuple[Unit, ...]):
    assert Analysis(Recorded(2, 4, units=split).run()).suggestion is None


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 3), st.lists(st.floats(0.1, 5), min_size=3, max_size=7), st.data())
def test_no_split_in_program_order_is_better(partitions: int, costs: list[float], data: st.DataObject):
    cuts = sorted(
        data.draw(st.sets(st.integers(1, len(costs) - 1), min_size=partitions - 1, max_size=partitions - 1))
    )
    places = [sum(number >= cut for cut in cuts) for number in range(len(costs))]
    work = [
        sum(cost for cost, place in zip(costs, places, strict=True) if place == each)
        for each in range(partitions)
    ]
    made = Recorded(partitions, 2, steps=2, forward_s=work, backward_s=work, units=units(costs, places))
    found = Analysis(made.run()).suggestion
    assert found is not None
    splits = itertools.combinations(range(1, len(costs)), partitions - 1)
    least = min(
        max(sum(costs[low:high]) for low, high in zip((0, *each), (*each, len(costs)), strict=True))
        for each in splits
    )
    assert max(found.after_s) == pytest.approx(4 * least)
    assert sum(found.after_s) == pytest.approx(sum(found.before_s))
