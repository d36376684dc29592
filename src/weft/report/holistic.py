"""Traces of single ranks that HolisticTraceAnalysis opens, as if a profiler of a GPU had written them.

That program knows ranks by `distributedInfo`, steps by annotations, work by the category `kernel` and a stream, and
communication by kernels that are called as NCCL's are. So work and communication of a rank become such kernels, under
weft's names; waits are where nothing runs.
"""

from __future__ import annotations

import json
from typing import Any

from weft.report.chrome import ORDER, ROWS, Event, Place, rank_events
from weft.timeline import WORK, Span, Timeline

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
            events += _kernel(rank, number, event)
        else:
            events.append(_on_host(rank, event["name"], event))
    known: dict[str, Any] = {"rank": rank, "world_size": len(timeline.ranks), "backend": "nccl"}
    # The rank comes first: the program takes the first one that it finds in the text.
    first = {"distributedInfo": known, "schemaVersion": 1, "displayTimeUnit": "ms"}
    return json.dumps({**first, "deviceProperties": [], "traceEvents": events})


def _on_host(rank: int, name: str, event: Event) -> Event:
    return {**event, "name": name, "cat": "user_annotation", "pid": rank, "tid": 0, "args": {}}


def _kernel(rank: int, number: int, event: Event) -> list[Event]:
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
