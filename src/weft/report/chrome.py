"""A timeline in the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank, a thread is one row: work, waits, sends, receives. Spans of one row that overlap without one
lying inside the other (two sends at once) would be drawn wrong, so each goes to the first row that is free.
"""

from __future__ import annotations

import json
from typing import Any

from weft.report.styles import STYLES
from weft.timeline import BESIDE, WORK, Span, Timeline

ROWS = {
    **dict.fromkeys(WORK, "work"),
    "reduce": "work",
    "optimizer": "work",
    "wait": "waits",
    "send": "sends",
    "recv": "receives",
    "step": "steps",
    **dict.fromkeys(BESIDE, "besides"),
}
"""Kind to the name of its row; the rows stand in the order of `ORDER`."""
ORDER = ("steps", "work", "waits", "sends", "receives", "besides")
_SPREAD = 1000


def chrome_trace(timeline: Timeline, title: str = "") -> str:
    """The text of a JSON file. Times are in microseconds from the timeline's start.

    >>> json.loads(chrome_trace(Timeline([Span(0, "F", 3, 0.5, 0.75)])))["traceEvents"][-1]["dur"]
    250000.0
    """
    events: list[dict[str, Any]] = []
    for rank in timeline.ranks:
        named = {"name": f"rank {rank}, idle {timeline.idle_share(rank):.1%}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": named})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += _rank(timeline, rank)
    other = {"title": title, "bubble": timeline.bubble}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _rank(timeline: Timeline, rank: int) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = []
    events = []
    ends: dict[int, float] = {}
    for span in timeline.of_rank(rank):
        row = ORDER.index(ROWS[span.kind])
        thread = row * _SPREAD
        while ends.get(thread, span.start_s) > span.start_s:
            thread += 1
        if thread not in ends:
            label = ORDER[row] if thread % _SPREAD == 0 else f"{ORDER[row]} {thread % _SPREAD + 1}"
            for what, value in (
                ("thread_name", {"name": label}),
                ("thread_sort_index", {"sort_index": thread}),
            ):
                names.append({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": value})
        ends[thread] = span.end_s
        events.append(_event(span, thread, timeline.start_s))
    return names + events


def _event(span: Span, thread: int, start_s: float) -> dict[str, Any]:
    name = "step" if span.kind == "step" else STYLES[span.kind].name
    number = span.step if span.kind == "step" else span.microbatch
    known = {"microbatch": span.microbatch, "stage": span.stage, "step": span.step}
    arguments: dict[str, Any] = {key: value for key, value in known.items() if value >= 0}
    if span.label:
        arguments["label"] = span.label
    return {
        "ph": "X",
        "name": f"{name} {number}" if number >= 0 else name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": round((span.start_s - start_s) * 1e6, 3),
        "dur": round(span.duration_s * 1e6, 3),
        "args": arguments,
    }
