"""The pictures of a run as numbers: lines in a field of 1000 x 100, bars in per cent of the longest.

The template makes inline SVG of them. Labels are no part of it, so that they keep their size on a narrow screen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weft.analysis.compare import Comparison
from weft.analysis.run import Sample
from weft.analysis.scaling import Scaling
from weft.report.run.labels import LINES, LOOKS, duration, milliseconds, number, percent
from weft.report.run.report import Report
from weft.report.run.run_tables import logged
from weft.units import format_bytes

WIDTH, HEIGHT = 1000.0, 100.0
MOST_POINTS = 600
"""Of a line; of more, the least and the most of each piece are kept."""
MOST_MARKS, MOST_LINES, MOST_BARS = 50, len(LINES), 64
Point = tuple[float, float]


class Line(NamedTuple):
    """A line before it has a place in the field."""

    name: str
    points: Sequence[Point]


class Drawn(NamedTuple):
    """A line of the field: `path` is that of SVG."""

    name: str
    path: str
    colour: str
    dash: str


class Chart(NamedTuple):
    """Lines over time.

    Attributes:
        marks: Points that stand out, each with what it is.
        more_marks: How many more there are, for which there is no place.
        limit: The height of a limit and its text; nothing if there is none.
        tops: The labels at the top, the middle and the bottom.
        sides: The labels at the left, the middle and the right.
    """

    title: str
    lines: list[Drawn]
    marks: list[tuple[float, float, str]]
    limit: tuple[float, str] | None
    tops: tuple[str, ...]
    sides: tuple[str, ...]
    axis: str
    more_marks: int = 0


class Piece(NamedTuple):
    """A piece of a bar, in per cent of the field."""

    part: str
    start: float
    width: float
    text: str
    label: str


class Bar(NamedTuple):
    """A bar with its name and its sum."""

    name: str
    pieces: list[Piece]
    total: str


class Bars(NamedTuple):
    """Bars on one axis from 0 to the longest, and the parts that they have."""

    title: str
    bars: list[Bar]
    parts: list[str]
    sides: tuple[str, ...]


def chart(
    title: str,
    lines: Sequence[Line],
    text: Callable[[float], str],
    axis: str = "step",
    side: Callable[[float], str] = lambda step: f"{step:.0f}",
    limit: tuple[float, str] | None = None,
    marks: Sequence[tuple[float, float, str]] = (),
    from_zero: bool = True,
) -> Chart | None:
    """A field that fits the lines; nothing if they have no two points.

    Args:
        title: What it shows.
        lines: At most as many as there are kinds of lines; values that are not finite leave a gap.
        text: How a value reads.
        axis: What runs to the right.
        side: How that reads.
        limit: A value to draw across, and what it is. It widens the field only up to three times the largest value.
        marks: Points that stand out.
        from_zero: The field begins at 0; else at the smallest value.
    """
    kept = [Line(line.name, thinned(line.points)) for line in lines[:MOST_LINES]]
    places = [x for line in kept for x, _ in line.points]
    heights = [y for line in kept for _, y in line.points if math.isfinite(y)]
    heights += [y for _, y, _ in marks]
    if len(set(places)) < 2 or not heights:
        return None
    left, right = min(places), max(places)
    low = min(0.0, *heights) if from_zero else min(heights)
    high = max(heights)
    if limit is not None and limit[0] <= 3 * high:
        high = max(high, limit[0])
    if high <= low:
        high = low + (abs(low) or 1.0)

    def place(x: float, y: float) -> Point:
        return (x - left) / (right - left) * WIDTH, HEIGHT - (y - low) / (high - low) * HEIGHT

    drawn = [
        Drawn(line.name, _path([place(*point) for point in line.points]), look.fill, look.stroke)
        for line, look in zip(kept, LINES, strict=False)
    ]
    across = None
    if limit is not None and limit[0] <= high:
        across = (place(left, limit[0])[1], limit[1])
    marked = [(*place(x, y), what) for x, y, what in marks[:MOST_MARKS]]
    middle = (low + high) / 2, (left + right) / 2
    return Chart(
        title, drawn, marked, across, (text(high), text(middle[0]), text(low)),
        (side(left), side(middle[1]), side(right)), axis, max(0, len(marks) - MOST_MARKS),
    )  # fmt: skip


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS` points; of each piece of the line its least and its most, so that peaks stay.

    >>> len(thinned([(x, 0.0) for x in range(10_000)])) <= MOST_POINTS
    True
    """
    if len(points) <= MOST_POINTS:
        return list(points)
    pieces = MOST_POINTS // 2
    kept = []
    for number_ in range(pieces):
        piece = points[number_ * len(points) // pieces : (number_ + 1) * len(points) // pieces]
        finite = [point for point in piece if math.isfinite(point[1])] or list(piece[:1])
        ends = {min(finite, key=lambda point: point[1]), max(finite, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def _path(points: Iterable[Point]) -> str:
    """The path of SVG; a value that is not finite interrupts it."""
    words, down = [], False
    for x, y in points:
        if not math.isfinite(y):
            down = False
            continue
        words.append(f"{'L' if down else 'M'}{x:.1f} {y:.1f}")
        down = True
    return "".join(words)


def step_times(report: Report) -> list[Chart]:
    """Every training step on its slowest rank, outliers marked; where there are some, the others once more alone."""
    far = set(report.outliers)
    marks = [
        (float(step), seconds, f"step {step}: {duration(seconds)}")
        for step, _, seconds in report.step_times
        if step in far
    ]
    marks.sort(key=lambda mark: -mark[1])
    everything = [(float(step), seconds) for step, _, seconds in report.step_times]
    found = [chart("Step times, of the slowest rank", [Line("step", everything)], duration, marks=marks)]
    if far:
        usual = [point for point in everything if point[0] not in far]
        found.append(chart("The same without outliers", [Line("step", usual)], duration))
    return [each for each in found if each is not None]


def memory(report: Report) -> Chart | None:
    """The most that each rank had in use, step by step; of many ranks those with the most."""
    series = {
        rank: [(float(step.step), float(step.memory_bytes)) for step in report.analysis.steps(rank)]
        for rank in report.analysis.ranks
        if any(step.memory_bytes for step in report.analysis.steps(rank))
    }
    most = sorted(series, key=lambda rank: -max(y for _, y in series[rank]))[:MOST_LINES]
    limits = [report.analysis.facts(rank).limit_bytes for rank in most]
    limit = min((each for each in limits if each), default=0)
    title = "Memory" if len(series) <= MOST_LINES else f"Memory of the {MOST_LINES} ranks that have the most"
    return chart(
        title, [Line(f"rank {rank}", series[rank]) for rank in sorted(most)], format_bytes,
        limit=(float(limit), f"limit {format_bytes(limit)}") if limit else None,
    )  # fmt: skip


SHARES: Sequence[tuple[str, Callable[[Sample], float]]] = (
    ("all", lambda sample: statistics.fmean(sample.cores) if sample.cores else math.nan),
    ("the job's ranks", lambda sample: sample.ours),
    ("their loaders", lambda sample: sample.loaders_share),
    ("others", lambda sample: sample.others),
    ("waiting for a disk", lambda sample: sample.io_wait),
    ("busiest core", lambda sample: max(sample.cores, default=math.nan)),
)
RATES: Sequence[tuple[str, Callable[[Sample], float]]] = (
    ("read from disks", lambda sample: sample.read_rate),
    ("written to disks", lambda sample: sample.write_rate),
    ("sent to hosts", lambda sample: sample.sent_rate),
    ("received from hosts", lambda sample: sample.received_rate),
)


def system(report: Report) -> list[Chart]:
    """For each host its processors, memory, rates and GPUs over the run."""
    found: list[Chart | None] = []
    start_s = report.analysis.timeline.start_s
    for host, samples in sorted(report.analysis.run.samples.items()):

        def over_time(
            title: str,
            figures: Sequence[tuple[str, Callable[[Sample], float]]],
            text: Callable[[float], str],
            limit: tuple[float, str] | None = None,
            host: str = host,
            samples: Sequence[Sample] = samples,
        ) -> Chart | None:
            lines = [
                Line(name, [(sample.at_s - start_s, figure(sample)) for sample in samples])
                for name, figure in figures
            ]
            shown = [line for line in lines if any(y for _, y in line.points)]
            return chart(f"{host}: {title}", shown, text, "seconds", lambda second: f"{second:.3g}", limit)

        most = max((sample.memory_limit_bytes for sample in samples), default=0)
        found += [
            over_time("processors, share of all cores", SHARES, percent),
            over_time(
                "memory", [("in use", lambda sample: float(sample.memory_bytes))], format_bytes,
                (float(most), f"the machine's {format_bytes(most)}") if most else None,
            ),
            over_time("disks and network, a second", RATES, format_bytes),
        ]  # fmt: skip
        devices = max((len(sample.devices) for sample in samples), default=0)
        busy = [(f"GPU {device}", _busy(device)) for device in range(min(devices, MOST_LINES))]
        found.append(over_time("GPUs, share of the time in which any work ran", busy, percent))
    return [each for each in found if each is not None]


def _busy(device: int) -> Callable[[Sample], float]:
    return lambda sample: sample.devices[device].busy if len(sample.devices) > device else math.nan


def values(report: Report) -> list[Chart]:
    """The values that the script logged, the loss first."""
    found = [
        chart(name, [Line(name, series)], number, from_zero=False)
        for name, series in list(logged(report).items())[:MOST_LINES]
    ]
    return [each for each in found if each is not None]


def _in_ms(seconds: float) -> str:
    return f"{milliseconds(seconds)} ms"


def bars(
    title: str, rows: Sequence[tuple[str, dict[str, float]]], text: Callable[[float], str] = _in_ms
) -> Bars:
    """Stacked bars of seconds by part; each row has a name. Of many rows there are the first ones.

    ``text``: how a duration reads.
    """
    if len(rows) > MOST_BARS:
        title, rows = f"{title} (the first {MOST_BARS} of {len(rows)} bars)", rows[:MOST_BARS]
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    made = []
    for name, parts in rows:
        pieces, reached, total = [], 0.0, sum(parts.values())
        for part, seconds in parts.items():
            if seconds <= 0.0:
                continue
            width = seconds / longest * 100
            share = seconds / total if total else 0.0
            label = f"{share:.0%}" if width >= 9 and share < 1.0 else ""
            tooltip = f"{LOOKS[part].name}: {text(seconds)}, {percent(share)}"
            pieces.append(Piece(part, round(reached, 3), round(width, 3), tooltip, label))
            reached += width
        made.append(Bar(name, pieces, text(total)))
    used = [*dict.fromkeys(part for _, parts in rows for part, seconds in parts.items() if seconds > 0.0)]
    return Bars(title, made, used, ("0", text(longest / 2), text(longest)))


def parts(report: Report) -> Bars:
    """Each rank's usual step."""
    rows = [(f"rank {rank}", each._asdict()) for rank, each in report.analysis.typical.items()]
    return bars("Each rank's usual step", rows)


def run_times(report: Report) -> Bars:
    """Into what the whole run went."""
    rows = [(f"rank {rank}", each._asdict()) for rank, each in report.analysis.run_times.items()]
    return bars("The whole run", rows, duration)


def balance(report: Report) -> Bars:
    """Each partition's work in a step, now and with the suggested split."""
    rows: list[tuple[str, dict[str, float]]] = []
    suggestion = report.analysis.suggestion
    for partition, now_s in report.analysis.partition_work.items():
        rows.append((f"partition {partition}", {"now": now_s}))
        if suggestion is not None and suggestion.moves:
            rows.append(("", {"suggested": suggestion.after_s[partition]}))
    return bars("Work of each partition in a step", rows)


def compared(comparison: Comparison) -> Bars:
    """A usual step before and now, the mean of all ranks."""
    order = {part: place for place, part in enumerate(LOOKS)}
    parts = sorted(comparison.parts, key=lambda each: order[each.part])
    before = {each.part: each.old_s for each in parts}
    return bars(
        "A usual step, the mean of all ranks",
        [("before", before), ("now", {each.part: each.new_s for each in parts})],
    )


def scaled(scaling: Scaling) -> Chart | None:
    """Samples a second by ranks, and what they would be if each rank did as much as one of the smallest run."""
    measured = [(float(row.ranks), row.samples_s) for row in scaling.rows]
    linear = [(float(row.ranks), row.linear) for row in scaling.rows]
    return chart("Samples a second", [Line("measured", measured), Line("linear", linear)], number, "ranks")
