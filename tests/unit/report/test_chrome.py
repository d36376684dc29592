"""The trace has every span, at its time, on a row where nothing else overlaps it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Recorded
from weft.analysis.messages import match
from weft.analysis.run import Device, Sample
from weft.report.chrome import ROWS, chrome_trace, rank_traces
from weft.timeline import KINDS, Span, Timeline

spans = st.builds(
    lambda rank, kind, microbatch, start, length, stage, label, step: Span(
        rank, kind, microbatch, start / 1e3, (start + length) / 1e3, stage, label, step
    ),
    st.integers(0, 2),
    st.sampled_from(KINDS),
    st.integers(-1, 9),
    st.integers(0, 50),
    st.integers(0, 20),
    st.integers(-1, 4),
    st.text(max_size=5),
    st.integers(-1, 2),
)


def events(timeline: Timeline, phase: str) -> list[dict]:
    return [event for event in json.loads(chrome_trace(timeline))["traceEvents"] if event["ph"] == phase]


@given(st.lists(spans, max_size=20))
def test_every_span_is_there_and_none_overlap_in_a_row(drawn):
    timeline = Timeline(drawn)
    found = events(timeline, "X")
    assert Counter((e["pid"], e["cat"], e["ts"], e["dur"]) for e in found) == Counter(
        (s.rank, s.kind, round((s.start_s - timeline.start_s) * 1e6, 3), round(s.duration_s * 1e6, 3))
        for s in timeline.spans
    )
    reached: dict[tuple[int, int], float] = {}
    for event in found:
        row = event["pid"], event["tid"]
        assert event["ts"] >= reached.get(row, 0.0) - 1e-2
        reached[row] = event["ts"] + event["dur"]
    named = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events(timeline, "M") if e["name"] == "thread_name"
    }
    for event in found:
        assert named[event["pid"], event["tid"]].split()[0] == ROWS[event["cat"]]


def test_what_an_event_tells():
    spans = [
        Span(3, "B", 5, 2.0, 2.25, 1, "", 7),
        Span(3, "send", 5, 2.0, 2.5, label="value to rank 2"),
        Span(3, "step", -1, 2.0, 3.0, step=7),
    ]
    timeline = Timeline(spans)
    told = {event["name"]: event for event in events(timeline, "X")}
    assert told["backward 5"]["args"] == {"microbatch": 5, "stage": 1, "step": 7}
    assert told["backward 5"]["ts"] == 0 and told["backward 5"]["dur"] == 250_000
    assert told["sending 5"]["args"] == {"microbatch": 5, "label": "value to rank 2"}
    assert told["step 7"]["args"] == {"step": 7}
    assert "rank 3, idle 75.0%" in [event["args"].get("name") for event in events(timeline, "M")]


def test_two_sends_at_once_get_two_rows():
    timeline = Timeline(
        [Span(0, "send", n, 0.0 + n / 10, 1.0) for n in range(3)] + [Span(0, "send", 3, 1.0, 2.0)]
    )
    rows = {event["name"]: event["tid"] for event in events(timeline, "X")}
    assert len({rows[f"sending {n}"] for n in range(3)}) == 3
    assert rows["sending 3"] in {rows[f"sending {n}"] for n in range(3)}
    names = [event["args"]["name"] for event in events(timeline, "M") if event["name"] == "thread_name"]
    assert names == ["sends", "sends 2", "sends 3"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_row(kind: str):
    assert events(Timeline([Span(0, kind, 0, 0.0, 1.0)]), "X")[0]["cat"] == kind


def test_an_empty_timeline():
    assert json.loads(chrome_trace(Timeline(), "nothing"))["otherData"] == {"title": "nothing", "bubble": 0.0}


def test_arrows_lead_from_each_send_to_its_receive():
    timeline = Recorded(partitions=2, microbatches=2, steps=2, transfer_s=0.25).run().timeline
    spans = events(timeline, "X")
    starts = {event["id"]: event for event in events(timeline, "s")}
    ends = {event["id"]: event for event in events(timeline, "f")}
    assert starts.keys() == ends.keys() and len(starts) == len(match(timeline)) == 2 * 4
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] != end["pid"] and start["name"] == end["name"] and end["bp"] == "e"
        for event, kind in ((start, "send"), (end, "recv")):
            assert any(
                span["cat"] == kind
                and (span["pid"], span["tid"]) == (event["pid"], event["tid"])
                and span["ts"] <= event["ts"] <= span["ts"] + span["dur"] + 1e-2
                for span in spans
            )


def test_two_equal_messages_at_once_are_two_arrows():
    spans = [Span(0, "send", 0, at, at + 1, label="value to rank 1", step=1, peer=1) for at in (0.0, 0.5)] + [
        Span(1, "recv", 0, at, at + 1, label="value from rank 0", step=1, peer=0) for at in (0.0, 0.5)
    ]
    timeline = Timeline(spans)
    assert [event["tid"] for event in events(timeline, "s")] == [
        event["tid"] for event in events(timeline, "X") if event["cat"] == "send"
    ]


def test_counters_of_microbatches_memory_and_hosts():
    run = Recorded(partitions=2, microbatches=4, steps=2).run()
    device = Device(0.5, power_w=float("nan"))
    run = replace(run, samples={"node": (Sample(1.0, (0.25, 0.75), devices=(device,)),)})
    found = json.loads(chrome_trace(run.timeline, "x", run))["traceEvents"]
    counters = [event for event in found if event["ph"] == "C"]
    held = [event["args"]["microbatches"] for event in counters if event["name"] == "microbatches held"]
    assert min(held) == 0 and max(held) == 2 and held.count(0) == 2 * (1 + 4)
    memory = [event for event in counters if event["name"] == "memory"]
    assert len(memory) == 4 and memory[0]["args"] == {"GiB": 100 / 1024}
    (busy,) = [event for event in counters if event["name"] == "busy, host node"]
    assert busy["args"] == {"cores": 0.5, "device 0": 0.5} and busy["ts"] == 1e6


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
