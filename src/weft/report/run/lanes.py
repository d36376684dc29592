"""The page's timeline: recorded steps, as many as the page can hold, and the ideal step above each.

The ideal step has the same schedule and work, shared out equally, with transfers that take no time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any, NamedTuple

from weft.analysis.analysis import Analysis
from weft.errors import WeftError
from weft.report.embedded import differences, fitting_tick_ns, page_data, ticks, timeline_data
from weft.report.run.labels import duration
from weft.report.run.report import Report
from weft.schedule import NAMES, make
from weft.simulate import Simulation, StageCost, simulate
from weft.timeline import Span, Timeline
from weft.untrusted import MOST_ACTIONS

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


def ideal_step(analysis: Analysis) -> Timeline | None:
    """One step of all copies, from time 0; nothing where the schedule or the work is not known.

    >>> from weft.analysis.run import Run
    >>> ideal_step(Analysis(Run("nothing", Timeline()))) is None
    True
    """
    name, partitions, microbatches = (
        analysis.setting(each) for each in ("pipeline", "partitions", "microbatches")
    )
    if not isinstance(partitions, int) or not isinstance(microbatches, int) or name not in NAMES:
        return None
    there = {analysis.facts(rank).pp_rank for rank in analysis.typical}
    if (
        not there
        or not 2 <= partitions == len(there) == max(there) + 1
        or microbatches * partitions > MOST_ACTIONS
    ):
        return None
    try:
        made = make(str(name), ranks=partitions, microbatches=microbatches)
        step = simulate(
            made.ranks, made.rank_of_stage, _equal_costs(analysis, len(made.rank_of_stage), microbatches)
        )
    except WeftError:
        return None  # the schedule needs what is not recorded
    return _of_all_copies(analysis, step)


def _equal_costs(analysis: Analysis, stages: int, microbatches: int) -> list[StageCost]:
    """Every stage takes the same: the mean over ranks, whether backward passes were split or not."""
    partitions = len({analysis.facts(rank).pp_rank for rank in analysis.typical})
    each = stages / partitions * microbatches

    def mean(*names: str) -> float:
        return (
            statistics.fmean(
                sum(getattr(parts, name) for name in names) for parts in analysis.typical.values()
            )
            / each
        )

    inputs, weights = mean("backward_inputs"), mean("backward_weights")
    backward = mean("backward", "backward_inputs", "backward_weights")
    halves = (inputs, weights) if inputs else (backward / 2, backward / 2)
    return [StageCost(mean("forward"), backward, *halves)] * stages


def _of_all_copies(analysis: Analysis, step: Simulation) -> Timeline:
    """The simulated partitions' spans, for each rank that has that partition."""
    spans = []
    for rank in analysis.typical:
        partition = analysis.facts(rank).pp_rank
        if partition in step.timeline.ranks:
            spans += [
                Span(rank, span.kind, span.microbatch, span.start_s, span.end_s, span.stage)
                for span in step.timeline.of_rank(partition)
            ]
    return Timeline(spans)
