"""The pictures of a plan as numbers: points of time and memory, and bars of memory; all in per cent of their field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.plan.parallelism.memory import Memory
from weft.plan.parallelism.search import Found, Plan
from weft.report.run.charts import Bar, Piece
from weft.report.run.labels import Table
from weft.report.styles import DOTS, FALLING, GRID, LEVEL, PLAIN, RISING, STYLES, Style
from weft.units import format_bytes, format_seconds

MEMORY = {
    "parameters": Style("parameters", "#3b76b8", "#ffffff", PLAIN, "#ffffff"),
    "gradients": Style("gradients", "#e39a3b", "#24292f", RISING, "#eebb78"),
    "states": Style("optimizer states", "#b8507a", "#ffffff", GRID, "#dc9ab6", 1.0),
    "activations": Style("activations", "#3f8f5b", "#ffffff", FALLING, "#6fb387"),
    "moment": Style("for a moment", "#8a63b5", "#ffffff", DOTS, "#cdb8e2"),
    "reserved": Style("driver, libraries", "#5f7480", "#ffffff", LEVEL, "#93a4ae", 1.5),
}
"""By the fields of `Memory`, in their order."""
LOOKS = MEMORY | {kind: STYLES[kind] for kind in ("F", "B", "I", "W", "reduce", "optimizer")}


def memory_parts(memory: Memory) -> dict[str, float]:
    """The fields of a memory that have a look, in bytes; they add up to its total."""
    return {name: getattr(memory, name) for name in MEMORY}


GIB = 2**30
SIDES = ("after", "before", "above", "below")
LETTER = (2.4, 6.0)
"""Of a label, about, in per cent of a narrow field."""
AWAY = 4.0
"""A label from its point, about, in per cent of a narrow field."""
CLOSE = (8.0, 5.0)
"""Points that are nearer than this to the first of them, across and down, share a label."""
INTERVALS = 5
"""Of an axis, at most."""

Named = tuple[float, float, str]
Rectangle = tuple[float, float, float, float]


class Point(NamedTuple):
    """A plan in the field.

    `kind` is `best`, one of the fastest, `of-kind`, the fastest of its kind, or `today`, the fastest that weft runs.
    """

    x: float
    y: float
    kind: str
    tooltip: str


class Label(NamedTuple):
    """The name of points, and at which of `SIDES` of (x, y) it stands."""

    x: float
    y: float
    text: str
    side: str


class Axis(NamedTuple):
    """From the lowest tick to the highest, which are equally far from each other."""

    ticks: tuple[str, ...]
    low: float
    high: float

    def place(self, value: float) -> float:
        """In per cent from the low end."""
        return round((value - self.low) / (self.high - self.low) * 100, 2)


class Scatter(NamedTuple):
    """Step time to the right, memory upwards; `limit` is how far down the limit of memory lies."""

    points: list[Point]
    labels: list[Label]
    limit: float
    limit_text: str
    across: Axis
    up: Axis


class MemoryBars(NamedTuple):
    """Bars of memory, the parts that they have, where the limit is, and the figures below."""

    bars: list[Bar]
    parts: list[str]
    limit: float
    sides: tuple[str, ...]


def scatter(found: Found, limit_bytes: float) -> Scatter | None:
    """The fastest plans and the fastest of each kind; nothing if nothing fits."""
    named = [(plan, "best", str(number)) for number, plan in enumerate(found.best, 1)]
    named += [(plan, "of-kind", kind) for kind, plan in found.of_kind.items()]
    if not named:
        return None
    if found.runs_today is not None:
        known = any(plan == found.runs_today for plan, _, _ in named)
        named.append((found.runs_today, "today", "" if known else "weft"))
    seconds = [plan.seconds for plan, _, _ in named]
    memory = [plan.memory.total / GIB for plan, _, _ in named]
    across = axis(*wider(min(seconds), max(seconds)), lambda at: format_seconds(at) if at else "0")
    up = axis(*wider(min(memory), max(limit_bytes / GIB, *memory)), lambda gib: f"{gib:g} GiB")
    points, names = [], []
    for plan, kind, name in named:
        x, y = across.place(plan.seconds), 100 - up.place(plan.memory.total / GIB)
        text = f"{plan.division}: {format_seconds(plan.seconds)}, {format_bytes(plan.memory.total)}"
        points.append(Point(x, round(y, 2), kind, f"{name or 'weft'}: {text}"))
        names += [(x, round(y, 2), name)] if name else []
    return Scatter(
        points, labels(names), round(100 - up.place(limit_bytes / GIB), 2), f"limit {format_bytes(limit_bytes)}",
        across, up,
    )  # fmt: skip


def wider(low: float, high: float) -> tuple[float, float]:
    """A range with some room at both ends, so that no point lies on the edge; none of it is below 0.

    >>> wider(10.0, 20.0), wider(0.1, 10.1)
    ((9.5, 20.5), (0.0, 10.6))
    """
    room = (high - low or abs(high)) * 0.05
    return max(0.0, low - room), high + room


def axis(low: float, high: float, text: Callable[[float], str]) -> Axis:
    """Round ticks around two values: 1, 2 or 5 times a power of ten apart.

    >>> axis(0.0, 71.5, "{:g}".format).ticks
    ('0', '20', '40', '60', '80')
    """
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / INTERVALS))
    for factor in (1, 2, 5, 10, 20):
        step = power * factor
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        last = max(last, first + 1)
        if last - first <= INTERVALS:
            break
    return Axis(tuple(text(step * tick) for tick in range(first, last + 1)), step * first, step * last)


def labels(named: Sequence[Named]) -> list[Label]:
    """One label for points that lie close together, at the side where it hides the fewest of the others.

    >>> [(label.text, label.side) for label in labels([(1, 50, "1"), (2, 51, "2"), (60, 50, "hybrid"), (65, 51, "3")])]
    [('1, 2', 'after'), ('hybrid, 3', 'after')]
    """
    taken: list[Rectangle] = []
    found = []
    for group in _groups(named):
        text = ", ".join(dict.fromkeys(name for _, _, name in group))
        others = [(x - 0.5, y - 1.5, x + 0.5, y + 1.5) for x, y, name in named if (x, y, name) not in group]
        places = [(side, *_place(side, group, text)) for side in SIDES]
        side, x, y, around = min(places, key=lambda place: _hidden(place[3], [*others, *taken]))
        taken.append(around)
        found.append(Label(round(x, 2), round(y, 2), text, side))
    return found


def _groups(named: Sequence[Named]) -> list[list[Named]]:
    """Points that are close to the first one of their group."""
    groups: list[list[Named]] = []
    for point in named:
        for group in groups:
            if abs(point[0] - group[0][0]) <= CLOSE[0] and abs(point[1] - group[0][1]) <= CLOSE[1]:
                group.append(point)
                break
        else:
            groups.append([point])
    return groups


def _place(side: str, group: Sequence[Named], text: str) -> tuple[float, float, Rectangle]:
    """Where a label stands and what it covers, about: left, top, right, bottom."""
    across, down = [x for x, _, _ in group], [y for _, y, _ in group]
    wide, high = LETTER[0] * len(text), LETTER[1]
    if side in ("above", "below"):
        x = (min(across) + max(across)) / 2
        y = min(down) - high if side == "above" else max(down) + high
        return x, y, (x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)
    y = group[0][1]
    x = max(across) if side == "after" else min(across)
    start = x + AWAY if side == "after" else x - AWAY - wide
    return x, y, (start, y - high / 2, start + wide, y + high / 2)


def _hidden(label: Rectangle, others: Sequence[Rectangle]) -> int:
    """The number of rectangles that a label lies over; all there are, if it leaves the field."""
    left, top, right, bottom = label
    if left < 0 or right > 100 or top < 0 or bottom > 100:
        return len(others) + 1
    return sum(left < one[2] and one[0] < right and top < one[3] and one[1] < bottom for one in others)


def memory_bars(rows: Sequence[tuple[str, Memory]], limit_bytes: float) -> MemoryBars:
    """Stacked bars on one axis from 0 to the largest of them or the limit."""
    longest = max([limit_bytes, *(memory.total for _, memory in rows)])
    bars = []
    for name, memory in rows:
        pieces, reached = [], 0.0
        for part, size in memory_parts(memory).items():
            width = size / longest * 100
            label = format_bytes(size) if width >= 9 else ""
            text = f"{MEMORY[part].name}: {format_bytes(size)}"
            if size > 0:
                pieces.append(Piece(part, round(reached, 3), round(width, 3), text, label))
            reached += width
        bars.append(Bar(name, pieces, format_bytes(memory.total)))
    ends = tuple(format_bytes(longest * share) for share in (0.5, 1.0))
    parts = [part for part in MEMORY if any(memory_parts(memory)[part] > 0 for _, memory in rows)]
    return MemoryBars(bars, parts, round(limit_bytes / longest * 100, 3), ("0", *ends))


def memory_rows(found: Found, plans: Sequence[Plan]) -> list[tuple[str, Memory]]:
    """The fullest rank of the best of each kind; where nothing fits, of what lacks least."""
    if plans:
        return [(plan.kind, plan.memory) for plan in plans]
    return [("nearest", found.nearest[1])] if found.nearest else []


def memory_table(rows: Sequence[tuple[str, Memory]]) -> Table:
    """The figures of the bars."""
    headers = ("", *(look.name for look in MEMORY.values()), "sum")
    shown = [
        (name, *(format_bytes(size) for size in memory_parts(memory).values()), format_bytes(memory.total))
        for name, memory in rows
    ]
    return Table("", headers, shown, "<".ljust(len(headers), ">"))
