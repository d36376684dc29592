"""Timelines as data of a page: short enough for tens of thousands of spans, and without markup.

Times are whole ticks from the start of the first timeline's first span, each start as the difference to the one
before; a page's script adds them up again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from weft.report.styles import STYLES, TILE
from weft.timeline import Span, Timeline

_KINDS = [*STYLES, "step"]


def embed(value: Any) -> str:
    """JSON for a script element: no text in it can end the element or begin another one."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def kinds() -> list[dict[str, Any]]:
    """The colours and pattern of each kind of span."""
    return [
        {
            "kind": kind,
            "name": style.name,
            "fill": style.fill,
            "ink": style.ink,
            "stroke": style.stroke,
            "width": style.stroke_width,
            "path": style.pattern.path,
        }
        for kind, style in STYLES.items()
    ]


def page_data(timelines: Iterable[dict[str, Any]], tick_ns: int = 1) -> dict[str, Any]:
    """The value that `spans.js` reads: timelines of `timeline_data`, made with the same tick."""
    return {"kinds": kinds(), "tile": TILE, "tick": tick_ns, "timelines": list(timelines)}


def timeline_data(name: str, timeline: Timeline, tick_ns: int = 1) -> dict[str, Any]:
    """One timeline, from its own start."""
    return {
        "name": name,
        "length": ticks(timeline.duration_s, tick_ns),
        "ranks": [
            {"rank": rank, "spans": _columns(timeline.of_rank(rank), timeline.start_s, tick_ns)}
            for rank in timeline.ranks
        ],
    }


def ticks(seconds: float, tick_ns: int) -> int:
    """Seconds in ticks."""
    return round(seconds * 1e9 / tick_ns)


def fitting_tick_ns(timeline: Timeline) -> int:
    """A power of ten of nanoseconds, so short that the median span is a thousand ticks or more.

    >>> fitting_tick_ns(Timeline([Span(0, "F", 0, 0.0, 0.002)]))
    1000
    """
    durations = [span.duration_s * 1e6 for span in timeline.spans if span.duration_s > 0.0]
    middle = statistics.median(durations) if durations else 0.0
    return int(10 ** math.floor(math.log10(middle))) if middle >= 1.0 else 1


def differences(values: Sequence[int]) -> list[int]:
    """Each value less the one before; the first less 0.

    >>> differences([5, 7, 7])
    [5, 2, 0]
    """
    return [second - first for first, second in pairwise([0, *values])]


def _columns(spans: Sequence[Span], start_s: float, tick_ns: int) -> dict[str, list[Any]]:
    """Column by column, which is shorter than span by span."""
    labels = {label: number for number, label in enumerate(dict.fromkeys(span.label for span in spans))}
    starts = [ticks(span.start_s - start_s, tick_ns) for span in spans]
    ends = [ticks(span.end_s - start_s, tick_ns) for span in spans]
    return {
        "kind": [_KINDS.index(span.kind) for span in spans],
        "start": differences(starts),
        "duration": [end - start for start, end in zip(starts, ends, strict=True)],
        "microbatch": [span.microbatch for span in spans],
        "stage": [span.stage for span in spans],
        "step": differences([span.step for span in spans]),
        "label": [labels[span.label] for span in spans],
        "labels": list(labels),
    }
