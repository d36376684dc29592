"""A timeline in the Trace Event Format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a rank, a thread is one row: work, waits, sends, receives. Spans of one row that overlap without one
lying inside the other (two sends at once) would be drawn wrong, so each goes to the first row that is free. An arrow
leads from each send to its receive. Counters show how many microbatches a rank holds, its memory, and its host's cores
and devices as far as a run knows them.

HolisticTraceAnalysis opens traces of single ranks, as if a profiler of a GPU had written them. It knows ranks by
`distributedInfo`, steps by annotations, work by the category `kernel` and a stream, and communication by kernels that
are called as NCCL's are. So work and communication of a rank become such kernels there, under weft's names; waits are
where nothing runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from weft.analysis.messages import content, match
from weft.analysis.run import Run
from weft.report.styles import STYLES
from weft.timeline import BESIDE, MESSAGES, WORK, Span, Timeline

ROWS = {
    **dict.fromkeys(WORK, "work"),
    "reduce": "work",
    "optimizer": "work",
    "wait": "waits",
    "send": "sends",
    "recv": "receives",
    "step": "steps",
    **dict.fromkeys(BESIDE, "besides"),
    "tensor": "besides",
}
"""Kind to the name of its row; the rows stand in the order of `ORDER`."""
ORDER = ("steps", "work", "waits", "sends", "receives", "besides")
_SPREAD = 1000


Event = dict[str, Any]
Place = tuple[int, int]
"""A rank and its row."""


def chrome_trace(timeline: Timeline, title: str = "", run: Run | None = None) -> str:
    """The text of a JSON file. Times are in microseconds from the timeline's start.

    ``run``: that of the timeline, for counters of memory, cores and devices.

    >>> json.loads(chrome_trace(Timeline([Span(0, "F", 3, 0.5, 0.75)])))["traceEvents"][-3]["dur"]
    250000.0
    """
    events: list[Event] = []
    rows: dict[Span, Place] = {}
    for rank in timeline.ranks:
        named = {"name": f"rank {rank}, idle {timeline.idle_share(rank):.1%}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": named})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        events += rank_events(timeline, rank, rows)
    events += _arrows(timeline, rows)
    events += _held(timeline)
    if run is not None:
        events += _measured(run, timeline.start_s)
    other = {"title": title, "bubble": timeline.bubble}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def rank_events(timeline: Timeline, rank: int, rows: dict[Span, Place]) -> list[Event]:
    """The events of a rank; where each span lies goes into ``rows``."""
    names: list[Event] = []
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
        rows[span] = (rank, thread)
        events.append(_event(span, thread, timeline.start_s))
    return names + events


def microseconds(seconds: float) -> float:
    """Seconds as these files have them."""
    return round(seconds * 1e6, 3)


def _event(span: Span, thread: int, start_s: float) -> Event:
    arguments: dict[str, Any] = {
        key: value
        for key, value in (("microbatch", span.microbatch), ("stage", span.stage), ("step", span.step))
        if value >= 0
    }
    if span.label:
        arguments["label"] = span.label
    return {
        "ph": "X",
        "name": event_name(span),
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": microseconds(span.start_s - start_s),
        "dur": microseconds(span.duration_s),
        "args": arguments,
    }


def event_name(span: Span) -> str:
    """The name of a span: `backward 5`, say."""
    name = "step" if span.kind == "step" else STYLES[span.kind].name
    number = span.step if span.kind == "step" else span.microbatch
    return f"{name} {number}" if number >= 0 else name


def _arrows(timeline: Timeline, rows: dict[Span, Place]) -> Iterator[Event]:
    """From the begin of each send to the end of its receive."""
    ends: dict[tuple[object, ...], Place] = {
        (span.kind, span.rank, span.peer, span.step, span.microbatch, content(span), at_s): row
        for span, row in rows.items()
        if span.kind in MESSAGES
        for at_s in (span.start_s if span.kind == "send" else span.end_s,)
    }
    for number, message in enumerate(match(timeline)):
        named = (message.step, message.microbatch, message.what)
        sent = ("send", message.sender, message.receiver, *named, message.ready_s)
        came = ("recv", message.receiver, message.sender, *named, message.arrived_s)
        for phase, (rank, thread), at_s in (
            ("s", ends[sent], message.ready_s),
            ("f", ends[came], message.arrived_s),
        ):
            yield {
                "ph": phase, "id": number, "name": message.what or "message", "cat": "message", "pid": rank,
                "tid": thread, "ts": microseconds(at_s - timeline.start_s), **({"bp": "e"} if phase == "f" else {}),
            }  # fmt: skip


def _held(timeline: Timeline) -> Iterator[Event]:
    """The number of microbatches that a rank holds: those whose forward pass began and whose backward pass has not
    ended."""
    for rank in timeline.ranks:
        first: dict[tuple[int, int], float] = {}
        last: dict[tuple[int, int], float] = {}
        for span in timeline.of_rank(rank):
            if span.kind in WORK and span.microbatch >= 0:
                first.setdefault((span.step, span.microbatch), span.start_s)
                last[span.step, span.microbatch] = span.end_s
        changes = sorted([*((at_s, 1) for at_s in first.values()), *((at_s, -1) for at_s in last.values())])
        held = 0
        for at_s, change in changes:
            held += change
            yield _counter(rank, "microbatches held", at_s - timeline.start_s, {"microbatches": held})


def _measured(run: Run, start_s: float) -> Iterator[Event]:
    """Memory of ranks by step; cores, memory and devices of hosts, at the first rank of each."""
    for rank, steps in run.steps.items():
        for step in steps:
            if step.memory_bytes:
                at_s = step.start_s + step.step_s - start_s
                yield _counter(rank, "memory", at_s, {"GiB": step.memory_bytes / (1 << 30)})
    for host, samples in run.samples.items():
        rank = min((each.rank for each in run.facts.values() if each.host == host), default=0)
        for sample in samples:
            shares = {"cores": sum(sample.cores) / len(sample.cores) if sample.cores else 0.0}
            shares |= {f"device {number}": each.busy for number, each in enumerate(sample.devices)}
            yield _counter(rank, f"busy, host {host}", sample.at_s - start_s, shares)


def _counter(rank: int, name: str, at_s: float, values: dict[str, float]) -> Event:
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    return {"ph": "C", "name": name, "pid": rank, "ts": microseconds(at_s), "args": finite}


COMMUNICATION = ("send", "recv", "reduce")
_WORK = (*WORK, "optimizer", "copy")
_FIRST_STREAM = 7
"""Number of the stream of work, that of PyTorch's own."""
_LAUNCH_US = 1.0
_FIRST_CORRELATION = 1 << 20
"""The program keeps these in as few bytes as they need, and indices of events then, which do not fit."""


def rank_traces(timeline: Timeline) -> dict[str, str]:
    """For each rank the name of its file, and the text.

    >>> list(rank_traces(Timeline([Span(0, "F", 0, 0, 1), Span(1, "B", 0, 1, 2)])))
    ['rank0.json', 'rank1.json']
    """
    return {f"rank{rank}.json": _trace(timeline, rank) for rank in timeline.ranks}


def _trace(timeline: Timeline, rank: int) -> str:
    rows: dict[Span, Place] = {}
    drawn = [event for event in rank_events(timeline, rank, rows) if event["ph"] == "X"]
    events: list[Event] = []
    for number, event in enumerate(drawn, _FIRST_CORRELATION):
        if event["cat"] == "step":
            events.append(_on_host(rank, f"ProfilerStep#{event['args'].get('step', 0)}", event))
        elif event["cat"] in (*_WORK, *COMMUNICATION):
            events += _kernel(number, event)
        else:
            events.append(_on_host(rank, event["name"], event))
    known: dict[str, Any] = {"rank": rank, "world_size": len(timeline.ranks), "backend": "nccl"}
    # The rank comes first: the program takes the first one that it finds in the text.
    first = {"distributedInfo": known, "schemaVersion": 1, "displayTimeUnit": "ms"}
    return json.dumps({**first, "deviceProperties": [], "traceEvents": events})


def _on_host(rank: int, name: str, event: Event) -> Event:
    return {**event, "name": name, "cat": "user_annotation", "pid": rank, "tid": 0, "args": {}}


def _kernel(number: int, event: Event) -> list[Event]:
    """A kernel, and the call that started it: both know each other by a number."""
    communicates = event["cat"] in COMMUNICATION
    name = f"ncclKernel {event['name']}" if communicates else event["name"]
    stream = _FIRST_STREAM + (ORDER.index(ROWS[event["cat"]]) - 1 if communicates else 0)
    named = {**event["args"], "stream": stream, "correlation": number, "device": 0}
    launch = {
        **event, "name": "cudaLaunchKernel", "cat": "cuda_runtime", "tid": 0, "args": {"correlation": number},
        "dur": min(_LAUNCH_US, event["dur"]),
    }  # fmt: skip
    return [launch, {**event, "name": name, "cat": "kernel", "tid": stream, "args": named}]
