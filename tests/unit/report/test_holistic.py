"""Traces of single ranks: what HolisticTraceAnalysis 0.5 was seen to need (it read those of this test's run)."""

from __future__ import annotations

import json
import re

import pytest

from tests.recordings import Recorded
from weft.report.holistic import rank_traces
from weft.timeline import KINDS, Span, Timeline

RUN = Recorded(partitions=2, microbatches=4, steps=3, transfer_s=0.01, reduce_s=0.2, optimizer_s=0.5).run()


@pytest.fixture(scope="module")
def traces() -> dict[int, dict]:
    files = rank_traces(RUN.timeline)
    assert list(files) == ["rank0.json", "rank1.json"]
    return {rank: json.loads(files[f"rank{rank}.json"]) for rank in (0, 1)}


def test_the_rank_is_the_first_one_in_the_text():
    for rank, text in enumerate(rank_traces(RUN.timeline).values()):
        found = re.search(r'"rank":\s+(\d+)', text)
        assert found is not None and int(found[1]) == rank


def test_steps_work_and_communication_are_told_apart(traces):
    for rank, trace in traces.items():
        assert trace["distributedInfo"] == {"rank": rank, "world_size": 2, "backend": "nccl"}
        events = trace["traceEvents"]
        steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
        assert steps == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
        kernels = [event for event in events if event["cat"] == "kernel"]
        communication = [event for event in kernels if re.match("^nccl.*Kernel", event["name"])]
        own = RUN.timeline.of_rank(rank)
        assert len(communication) == sum(span.kind in ("send", "recv", "reduce") for span in own)
        work = sum(event["dur"] for event in kernels if event not in communication)
        optimizer_s = sum(span.duration_s for span in own if span.kind == "optimizer")
        assert work == pytest.approx((RUN.timeline.busy_s(rank) + optimizer_s) * 1e6)
        assert {event["args"]["stream"] for event in kernels}.isdisjoint({-1, 0})


def test_each_kernel_has_a_launch_of_its_number(traces):
    events = traces[0]["traceEvents"]
    launches = {event["args"]["correlation"] for event in events if event["cat"] == "cuda_runtime"}
    kernels = [event["args"]["correlation"] for event in events if event["cat"] == "kernel"]
    assert launches == set(kernels) and len(kernels) == len(launches) and min(kernels) > 1 << 16


def test_every_event_has_what_the_program_asks_for():
    timeline = Timeline([Span(0, kind, 0, number, number + 1) for number, kind in enumerate(KINDS)])
    for event in json.loads(rank_traces(timeline)["rank0.json"])["traceEvents"]:
        assert event["ph"] == "X" and {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
