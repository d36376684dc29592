"""The page's timeline: recorded steps, as many as the page can hold, and the ideal step above each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from weft.report.embedded import differences, fitting_tick_ns, page_data, ticks, timeline_data
from weft.report.run.ideal import ideal_step
from weft.report.run.labels import duration
from weft.report.run.report import Report
from weft.timeline import Timeline

MOST_SPANS = 64_000
"""On one page; they take up to 25 bytes each."""


class Lanes(NamedTuple):
    """The timeline's data.

    Attributes:
        data: What `spans.js` reads.
        kinds: Those of spans that are there.
        steps: For the list of steps: number and what stands in the list.
        note: How much of the run is there, a sentence.
        first: The step to open at; nothing if spans have no steps.
    """

    data: dict[str, Any]
    kinds: set[str]
    steps: list[tuple[int, str]]
    note: str
    first: int | None


def lanes(report: Report, most_spans: int = MOST_SPANS) -> Lanes:
    """The steps that explain most: those of findings, outliers, the first one, and usual ones."""
    timeline = report.analysis.timeline
    chosen = _chosen(report, most_spans)
    shown = (
        timeline if not timeline.steps else Timeline(span for span in timeline.spans if span.step in chosen)
    )
    first = report.step if report.step is not None else report.usual_step
    tick_ns = fitting_tick_ns(shown)
    recorded = timeline_data("recorded", shown, tick_ns)
    recorded["messages"] = _messages(report, shown, tick_ns)
    entries = [recorded]
    ideal = ideal_step(report.analysis)
    if ideal is not None and chosen:
        above = timeline_data("ideal: equal partitions, free transfers", ideal, tick_ns)
        starts = [own.start_s - shown.start_s for own in _steps(shown).values()]
        above |= {"moments": [ticks(start_s, tick_ns) for start_s in starts], "length": recorded["length"]}
        entries.insert(0, above)
    data = page_data(entries, tick_ns)
    if first is not None:
        data["first"] = first
    return Lanes(
        data, {span.kind for span in shown.spans}, _listed(report, shown), _note(report, chosen, shown), first
    )


def _chosen(report: Report, most_spans: int) -> set[int]:
    """Steps in the order of what they explain, until the page is full; a single one is always there."""
    timeline = report.analysis.timeline
    sizes: dict[int, int] = defaultdict(int)
    for span in timeline.spans:
        sizes[span.step] += 1
    usual = report.usual_step
    near = sorted(timeline.steps, key=lambda step: abs(step - (usual or 0)))
    wanted = [report.step, usual, *(step for finding in report.found for step in finding.steps[:3])]
    wanted += [*report.outliers[:10], *timeline.steps[:1], *near]
    chosen: set[int] = set()
    held = 0
    for step in wanted:
        if step is None or step in chosen or step not in sizes:
            continue
        if chosen and held + sizes[step] > most_spans:
            continue
        chosen.add(step)
        held += sizes[step]
    return chosen


class _Step(NamedTuple):
    start_s: float
    end_s: float


def _steps(timeline: Timeline) -> dict[int, _Step]:
    """For each step from when to when it ran, on any rank."""
    found: dict[int, _Step] = {}
    for span in timeline.spans:
        if span.step >= 0 and span.kind == "step":
            start_s, end_s = found.get(span.step, (span.start_s, span.end_s))
            found[span.step] = _Step(min(start_s, span.start_s), max(end_s, span.end_s))
    return found


def _listed(report: Report, shown: Timeline) -> list[tuple[int, str]]:
    far = set(report.outliers)
    rows = []
    for step, (start_s, end_s) in sorted(_steps(shown).items()):
        marks = [
            text for text, there in (("usual", step == report.usual_step), ("outlier", step in far)) if there
        ]
        rows.append((step, ", ".join([f"step {step}: {duration(end_s - start_s)}", *marks])))
    return rows


def _note(report: Report, chosen: set[int], shown: Timeline) -> str:
    recorded, spans = report.analysis.timeline.steps, report.analysis.timeline.spans
    if len(chosen) >= len(recorded):
        return f"All {len(recorded)} recorded steps are here, with {len(spans):,} spans."
    return (
        f"{len(chosen)} of {len(recorded)} recorded steps are here, with {len(shown.spans):,} of {len(spans):,} spans: "
        "usual ones, outliers and those that findings name. `weft draw` shows all."
    )


def _messages(report: Report, shown: Timeline, tick_ns: int) -> dict[str, list[int]]:
    """Columns of the messages in the steps that are shown, by arrival."""
    steps = set(shown.steps)
    found = [message for message in report.analysis.messages if message.step in steps or not steps]
    arrived = [ticks(message.arrived_s - shown.start_s, tick_ns) for message in found]
    ready = [ticks(message.ready_s - shown.start_s, tick_ns) for message in found]
    return {
        "sender": [message.sender for message in found],
        "receiver": [message.receiver for message in found],
        "arrived": differences(arrived),
        "taken": [end - start for start, end in zip(ready, arrived, strict=True)],
    }
