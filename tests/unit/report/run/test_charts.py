"""Pictures have their points where the figures are."""

from __future__ import annotations

import math
import re

import pytest

from tests.unit.report.run.reports import MS, made, report
from weft.report.run import charts
from weft.report.run.charts import MOST_POINTS, Line, bars, chart, thinned
from weft.report.run.labels import number


def points(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]


def test_a_line_fills_the_field():
    found = chart("", [Line("a", [(10.0, 0.0), (15.0, 1.0), (20.0, 4.0)])], number)
    assert found is not None
    assert points(found.lines[0].path) == [(0, 100), (500, 75), (1000, 0)]
    assert (found.tops, found.sides) == (("4", "2", "0"), ("10", "15", "20"))


def test_a_value_that_is_not_finite_leaves_a_gap():
    found = chart("", [Line("a", [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 1.0)])], number)
    assert found is not None and found.lines[0].path == "M0.0 0.0M1000.0 0.0"


@pytest.mark.parametrize(
    "line", [[], [(1.0, 2.0)], [(1.0, 2.0), (1.0, 3.0)], [(1.0, math.nan), (2.0, math.nan)]]
)
def test_nothing_to_draw(line: list[tuple[float, float]]):
    assert chart("", [Line("a", line)], number) is None


@pytest.mark.parametrize(("limit", "height"), [(5.0, 0.0), (2.0, 50.0), (100.0, None)])
def test_a_limit_is_drawn_where_it_does_not_flatten_the_lines(limit: float, height: float | None):
    found = chart("", [Line("a", [(0.0, 4.0), (1.0, 4.0)])], number, limit=(limit, "limit"))
    assert found is not None and (found.limit[0] if found.limit else None) == height


def test_thinning_keeps_peaks_and_valleys():
    series = [(float(x), 1.0) for x in range(100_000)]
    series[77_777], series[5] = (77_777.0, 9.0), (5.0, -3.0)
    kept = thinned(series)
    assert len(kept) <= MOST_POINTS and {(77_777.0, 9.0), (5.0, -3.0)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_outliers_of_the_run_are_marked():
    found, without = charts.step_times(report(made()))
    ((x, y, what),) = found.marks
    assert (what, y) == ("step 10: 500 ms", 0.0) and x == pytest.approx(1000 * 8 / 18)
    assert without.tops[0] == "40.5 ms" and not without.marks


def test_what_has_no_place_is_counted():
    marks = [(float(x), 1.0, "far") for x in range(60)]
    found = chart("", [Line("a", [(0.0, 4.0), (60.0, 4.0)])], number, marks=marks)
    assert found is not None and (len(found.marks), found.more_marks) == (50, 10)
    many = bars("Work", [(f"rank {rank}", {"forward": 1.0 + (rank == 99)}) for rank in range(100)])
    assert many.title == "Work (the first 64 of 100 bars)" and len(many.bars) == 64
    assert many.bars[0].pieces[0].width == 100.0


def test_memory_of_many_ranks_is_that_of_those_with_the_most():
    found = charts.memory(report(made(partitions=12, slow={}, microbatches=12, steps=4)))
    assert found is not None and [line.name for line in found.lines] == [
        f"rank {rank}" for rank in range(4, 12)
    ]
    assert len({(line.colour, line.dash) for line in found.lines}) == 8
    assert len({line.dash for line in found.lines}) == 8, "they differ without colour"


def test_a_machine_has_its_pictures():
    titles = [each.title for each in charts.system(report(made()))]
    assert titles == [
        "node: processors, share of all cores", "node: memory", "node: disks and network, a second",
        "node: GPUs, share of the time in which any work ran",
    ]  # fmt: skip


def test_bars_add_up():
    found = bars("", [("a", {"forward": 1.0, "backward": 2.0, "data": 0.0}), ("b", {"host": 6.0})])
    assert [(p.part, p.start, p.width) for p in found.bars[0].pieces] == [
        ("forward", 0.0, 16.667), ("backward", 16.667, 33.333),
    ]  # fmt: skip
    assert found.bars[1].pieces[0].width == 100.0 and found.parts == ["forward", "backward", "host"]
    assert found.bars[0].total == "3000 ms"


def test_parts_of_every_rank_are_bars_as_long_as_its_step():
    found = charts.parts(report(made(data_s=3 * MS)))
    assert len(found.bars) == 4
    for bar in found.bars:
        assert sum(piece.width for piece in bar.pieces) == pytest.approx(100, abs=0.1)
