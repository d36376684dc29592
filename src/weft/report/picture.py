"""A timeline as a picture: who ran what when, as an SVG that needs nothing else, or a PNG.

One lane a rank; time runs to the right. Forward and backward boxes carry the microbatch's number where
it fits; where a rank has several stages, boxes of later ones are lower. What is left of the lane's grey
ground is idle time, and its share stands at the lane's end. Sends and receives, which happen beside the work,
lie in two thin rows below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from weft.report.png import png
from weft.report.shapes import Box, Line, Note, Picture, svg
from weft.report.styles import STYLES
from weft.timeline import MESSAGES, WORK, Span, Timeline

WIDTH, LEFT, RIGHT = 1200, 80, 100
TOP, LANE_HEIGHT, GAP, BOX = 84, 46, 14, 38
LOWER, LOWEST = 12, 14
"""How much lower the boxes of a rank's next stage are, and how low boxes may get."""
ROW = 7
"""Height of the rows of sends and receives."""
LEGEND_LINE = 24
TICKS_AT_MOST = 10
LATER = "lower boxes: a later stage of the rank"


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """The picture as the text of an SVG file.

    >>> from weft.timeline import Span
    >>> timeline_svg(Timeline([Span(0, "F", 0, 0.0, 0.002)]), "one step").startswith("<svg")
    True
    """
    return svg(_draw(timeline, title))


def timeline_png(timeline: Timeline, title: str = "") -> bytes:
    """The picture as the content of a PNG file.

    Raises :class:`UsageError` if Pillow is not installed.

    >>> timeline_png(Timeline([Span(0, "F", 0, 0.0, 0.002)]), "one step")[1:4]
    b'PNG'
    """
    return png(_draw(timeline, title))


def _draw(timeline: Timeline, title: str) -> Picture:
    legend, top = _legend(timeline)
    lanes = _Lanes(timeline, top)
    bottom = top + len(timeline.ranks) * (lanes.height + GAP)
    shapes = [
        Note(LEFT, 30, title, "title"),
        *legend,
        Note(WIDTH - RIGHT + 12, top - 14, "idle"),
        *_axis(timeline, top, bottom),
    ]
    for number, rank in enumerate(timeline.ranks):
        shapes += lanes.draw(rank, top + number * (lanes.height + GAP))
    return Picture(WIDTH, bottom + 44, title, shapes)


def _legend(timeline: Timeline) -> tuple[list[Box | Note], int]:
    """The kinds that there are, in as many lines as they need, and where the first lane begins."""
    kinds = {span.kind for span in timeline.spans}
    entries = [(kind, style.name) for kind, style in STYLES.items() if kind in kinds] + [("idle", "idle")]
    shapes: list[Box | Note] = []
    x, y = float(LEFT), 46
    for kind, name in entries:
        width = 22 + 8.0 * len(name) + 22
        if x + width > WIDTH and x > LEFT:
            x, y = float(LEFT), y + LEGEND_LINE
        shapes.append(Box(x, y, 16, 16, kind, "#b6bec8"))
        shapes.append(Note(x + 22, y + 13, name))
        x += width
    if any(len(stages) > 1 for stages in _stages(timeline).values()):
        if x + 8.0 * len(LATER) > WIDTH:
            x, y = float(LEFT), y + LEGEND_LINE
        shapes.append(Note(x, y + 13, LATER))
        x += 8.0 * len(LATER)
    return shapes, y + TOP - 46 + (14 if x > WIDTH - RIGHT else 0)


def _stages(timeline: Timeline) -> dict[int, list[int]]:
    """For each rank the stages that it works on, in order."""
    pairs = {(span.rank, span.stage) for span in timeline.spans if span.kind in WORK and span.stage >= 0}
    return {rank: sorted(stage for at, stage in pairs if at == rank) for rank in timeline.ranks}


def _axis(timeline: Timeline, top: int, bottom: int) -> Iterator[Line | Note]:
    """Lines at round times, with their names in milliseconds below."""
    duration_ms = timeline.duration_s * 1e3
    step_ms = _round_step(duration_ms)
    digits = max(0, -math.floor(math.log10(step_ms)))
    for tick in range(math.floor(duration_ms / step_ms + 1e-9) + 1):
        x = LEFT + tick * step_ms * _pixels_a_second(timeline) / 1e3
        yield Line(x, top - 8, bottom)
        yield Note(x, bottom + 16, f"{tick * step_ms:.{digits}f}", "tick")
    yield Note((LEFT + WIDTH - RIGHT) / 2, bottom + 36, "milliseconds", "tick")


class _Lanes:
    """Draws lanes that are alike: with rows for sends and receives on all ranks or on none."""

    def __init__(self, timeline: Timeline, top: int) -> None:
        self.timeline = timeline
        self.scale = _pixels_a_second(timeline)
        self.stages = _stages(timeline)
        kinds = {span.kind for span in timeline.spans}
        self.rows = [kind for kind in MESSAGES if kind in kinds]
        self.height = LANE_HEIGHT + ROW * len(self.rows)

    def draw(self, rank: int, y: int) -> Iterator[Box | Note]:
        middle = y + LANE_HEIGHT / 2 + 5
        yield Note(12, middle, f"rank {rank}")
        yield Box(LEFT, y, WIDTH - LEFT - RIGHT, self.height, "idle")
        spans = [span for span in self.timeline.of_rank(rank) if span.kind in STYLES]
        for span in sorted(spans, key=lambda span: span.kind in WORK):
            yield from self._box(span, y)
        yield Note(WIDTH - RIGHT + 12, middle, f"{self.timeline.idle_share(rank):.1%}")

    def _box(self, span: Span, y: int) -> Iterator[Box | Note]:
        x = LEFT + (span.start_s - self.timeline.start_s) * self.scale
        width = max(span.duration_s * self.scale, 0.5)
        if span.kind in self.rows:
            top, height = y + LANE_HEIGHT + ROW * self.rows.index(span.kind) - 2.0, ROW - 1.0
        else:
            height = BOX / 2
            if span.kind in WORK:
                before = self.stages[span.rank].index(span.stage) if span.stage >= 0 else 0
                height = max(BOX - LOWER * before, LOWEST)
            top = y + (LANE_HEIGHT - height) / 2
        yield Box(x, top, width, height, span.kind, "#ffffff", tooltip(span))
        number = str(span.microbatch)
        if span.kind in WORK and span.microbatch >= 0 and width >= 8 * len(number) + 4:
            yield Note(x + width / 2, y + LANE_HEIGHT // 2 + 4, number, "number", STYLES[span.kind].ink)


def tooltip(span: Span) -> str:
    """The text shown to a pointer that rests on the box."""
    label = f" ({span.label})" if span.label else ""
    parts = [
        f"{name} {number}"
        for name, number in (("microbatch", span.microbatch), ("stage", span.stage), ("step", span.step))
        if number >= 0
    ]
    return f"{STYLES[span.kind].name}{label}: " + ", ".join([*parts, f"{span.duration_s * 1e3:.2f} ms"])


def _pixels_a_second(timeline: Timeline) -> float:
    return (WIDTH - LEFT - RIGHT) / timeline.duration_s if timeline.duration_s else 0.0


def _round_step(duration_ms: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are at most `TICKS_AT_MOST` steps."""
    if duration_ms <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(duration_ms / TICKS_AT_MOST))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * TICKS_AT_MOST >= duration_ms)
