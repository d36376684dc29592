"""Traces that torch.profiler wrote: real ones of two processes, and small ones of which everything is known."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.launching import run_ranks
from weft.analysis.analysis import Analysis
from weft.errors import FormatError
from weft.profiler.foreign_traces import is_traces, read_traces

JOB = """
import sys, time
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

dist.init_process_group("gloo")
rank, layer = dist.get_rank(), torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

def keep(found):
    found.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json" + (".gz" if rank else ""))

with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2), on_trace_ready=keep
) as found:
    for step in range(3):
        for microbatch in range(2):
            if rank == 0:
                with record_function(f"0F{microbatch}"):
                    time.sleep(0.3)
                    y = layer(torch.randn(8, 64))
                dist.send(y.detach(), 1)
            else:
                x = torch.empty(8, 64)
                dist.recv(x, 0)
                with record_function(f"1F{microbatch}"):
                    loss = layer(x).sum()
                loss.backward()
        for parameter in layer.parameters():
            gradient = torch.ones_like(parameter)
            dist.all_reduce(gradient)
            parameter.grad = gradient
        optimizer.step()
        found.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(2, JOB, [str(folder)], launcher="torchrun", env={"PYTHONWARNINGS": "ignore"}).check()
    return folder


def test_a_pipeline_of_two_processes(real: Path):
    """Rank 0 sleeps 0.3 s in each microbatch, so rank 1 does nothing but wait for it."""
    assert is_traces(real)
    run = read_traces(real)
    assert run.ranks == (0, 1) and run.warnings == () and run.clock_error_s == 0 and run.complete
    assert [step.step for step in run.steps[0]] == [1, 2] == [step.step for step in run.steps[1]]
    work = [(span.kind, span.stage, span.microbatch) for span in run.timeline.of_rank(0) if span.stage >= 0]
    assert work == [("F", 0, 0), ("F", 0, 1)] * 2
    kinds = {span.kind for span in run.timeline.of_rank(1)}
    assert {"step", "F", "B", "recv", "wait", "optimizer"} <= kinds and "send" not in kinds
    analysis = Analysis(run)
    assert len(analysis.messages) == 4 and {message[:2] for message in analysis.messages} == {(0, 1)}
    assert analysis.waits[1, 0] > 0.3 > analysis.waits.get((0, 1), 0.0)
    assert analysis.typical[0].forward > 0.5 > analysis.typical[1].forward
    assert analysis.typical[1].backward > 0 and analysis.typical[1].optimizer > 0
    for own in analysis.parts.values():
        for period, parts in own.items():
            assert parts.total == pytest.approx(period.duration_s, abs=1e-6)


def test_a_trace_that_is_missing_or_cut(real: Path, tmp_path: Path):
    content = (real / "rank0.json").read_text()
    (tmp_path / "one.json").write_text(content)
    run = read_traces(tmp_path)
    assert run.ranks == (0,) and run.warnings == (f"{tmp_path} has no trace of rank 1",)
    (tmp_path / "two.json").write_text(content[:-200])
    (tmp_path / "three.json.gz").write_bytes((real / "rank1.json.gz").read_bytes()[:500])
    told = read_traces(tmp_path).warnings
    assert len(told) == 3 and all("left out" in each for each in told[:2])
    assert read_traces(real / "rank1.json.gz").ranks == (1,)


def test_a_recording_of_weft_is_no_folder_of_traces(real: Path, tmp_path: Path):
    shutil.copy(real / "rank0.json", tmp_path / "rank0.facts.json")
    (tmp_path / "rank0.spans").write_bytes(b"")
    assert not is_traces(tmp_path) and not is_traces(tmp_path / "none")


def event(name: str, start: float, length: float, category: str = "cpu_op", thread: int = 1, **known) -> dict:
    return {
        "ph": "X", "name": name, "cat": category, "ts": start, "dur": length, "pid": 7, "tid": thread, "args": known,
    }  # fmt: skip


def said(name: str, start: float, length: float, thread: int = 1, **known) -> dict:
    return event(name, start, length, "user_annotation", thread, **known)


def written(folder: Path, events: list, name: str = "trace.json", **more: object) -> Path:
    text = json.dumps({"traceEvents": events, **more})
    path = folder / name
    path.write_bytes(gzip.compress(text.encode())) if name.endswith(".gz") else path.write_text(text)
    return folder


def seen(folder: Path) -> list[tuple]:
    """Kind, microbatch, begin and end in microseconds, by begin."""
    return [
        (span.kind, span.microbatch, round(span.start_s * 1e6), round(span.end_s * 1e6))
        for span in read_traces(folder).timeline.spans
        if span.kind != "step"
    ]


def test_what_work_hides_is_no_waiting(tmp_path: Path):
    """A sum from 100 to 1000, while work runs from 0 to 300 and from 600 to 700."""
    events = [
        said("ProfilerStep#4", 0, 2000), said("forward", 0, 300), said("Backward 1", 600, 100),
        said("gloo:all_reduce", 100, 900, thread=2),
    ]  # fmt: skip
    assert seen(written(tmp_path, events)) == [
        ("F", -1, 0, 300), ("reduce", -1, 300, 600), ("B", 1, 600, 700), ("reduce", -1, 700, 1000),
    ]  # fmt: skip


def test_operators_of_one_kind_without_a_gap_are_one_span(tmp_path: Path):
    events = [
        said("ProfilerStep#4", 0, 9000),
        event("aten::linear", 0, 50), event("aten::addmm", 10, 20), event("aten::relu", 60, 40),
        event("c10d::allreduce_", 120, 30), event("aten::copy_", 125, 5),
        event("autograd::engine::evaluate_function: AddmmBackward0", 500, 100, thread=3),
        event("aten::mm", 510, 20, thread=3), event("aten::mm", 1000, 20, thread=4),
        said("Optimizer.step#SGD.step", 2000, 100), event("aten::add_", 2010, 10),
        said("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 3000, 500),
    ]  # fmt: skip
    assert seen(written(tmp_path, events)) == [
        ("F", -1, 0, 100), ("B", -1, 500, 600), ("optimizer", -1, 2000, 2100), ("data", -1, 3000, 3500),
    ]  # fmt: skip


def test_kernels_are_the_work_of_the_range_that_started_them(tmp_path: Path):
    launch = "cudaLaunchKernel"
    events = [
        said("ProfilerStep#1", 0, 900), said("PP:0F2", 0, 10), said("PP:0B2", 10, 10),
        event(launch, 1, 1, "cuda_runtime", correlation=1), event(launch, 12, 1, "cuda_runtime", correlation=2),
        event("gemm", 100, 200, "kernel", 9, correlation=1), event("gemm", 300, 400, "kernel", 9, correlation=2),
        event("Memcpy HtoD (Pageable -> Device)", 50, 20, "gpu_memcpy", 9, correlation=3),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 650, 150, "kernel", 10),
    ]  # fmt: skip
    assert seen(written(tmp_path, events)) == [
        ("copy", -1, 50, 70), ("F", 2, 100, 300), ("B", 2, 300, 700), ("reduce", -1, 700, 800),
    ]  # fmt: skip
    assert read_traces(tmp_path).facts[0].device == "cuda"


def test_hosts_lie_on_the_wall_clock(tmp_path: Path):
    """Of 1.8e9 s with nanoseconds, which no float holds."""
    base = 1_800_000_000_000_000_000
    for rank, later in ((0, 0), (1, 3_000)):
        written(
            tmp_path, [said("0F0", 5, 1)], f"{rank}.json.gz", baseTimeNanoseconds=base + later, host_name=f"host{rank}",
            distributedInfo={"rank": rank, "world_size": 2},
        )  # fmt: skip
    run = read_traces(tmp_path)
    assert [span.start_s for span in run.timeline.spans] == pytest.approx([0.0, 3e-6], abs=1e-10)
    assert run.clock_error_s == float("inf") and "several hosts" in run.warnings[0]


def test_the_other_end_is_known_by_what_nccl_tells(tmp_path: Path):
    events = [
        event("ncclDevKernel_SendRecv(x)", 0, 5, "kernel", 2),
        event("ncclDevKernel_Recv_x", 10, 5, "kernel", 2, **{"Src Rank": 2}),
        event("ncclDevKernel_Recv_x", 20, 5, "kernel", 2, **{"Src Rank": "all"}),
    ]
    written(tmp_path, events, distributedInfo={"rank": 0, "world_size": 4})
    spans = read_traces(tmp_path).timeline.spans
    assert [(span.kind, span.peer) for span in spans if span.start_s > 0] == [
        ("recv", 2), ("wait", 2), ("recv", -1), ("wait", -1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "null", '{"traceEvents": {}}', '{"traceEvents": [1, null, []]}', "[" * 100_000,
        '{"traceEvents": [{"ph": "X", "name": "0F1", "cat": "user_annotation", "ts": 1e400, "dur": 1}]}',
        '{"traceEvents": [{"ph": "X", "name": "0F1", "cat": "user_annotation", "ts": 1, "dur": -1}]}',
        '{"traceEvents": [{"ph": "X", "name": "nothing", "ts": 1, "dur": 1}]}',
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FormatError):
        read_traces(tmp_path)


def test_hostile_fields_do_no_harm(tmp_path: Path):
    events = [
        said("0F1", 0, 5),
        said("mine", 9, 1),
        {"ph": "X", "name": "x", "cat": [], "ts": 1, "dur": 1, "pid": "a", "tid": {}, "args": "none"},
        {"ph": "X", "name": 5, "cat": "cpu_op", "ts": 1, "dur": 1},
        {"ph": "X", "name": "gloo:recv", "cat": "user_annotation", "ts": True, "dur": 1},
        said("ProfilerStep#" + "9" * 400, 0, 1),
    ]
    written(tmp_path, events, distributedInfo={"rank": 10**30, "world_size": -1}, baseTimeNanoseconds="x")
    run = read_traces(tmp_path)
    assert run.ranks == (0,) and [span.kind for span in run.timeline.spans] == ["F"]
    assert run.warnings == (f"{tmp_path / 'trace.json'}: 2 events are damaged and left out",)


def test_a_folder_without_traces(tmp_path: Path):
    with pytest.raises(FormatError, match=r"holds no trace that can be read: write one file a rank"):
        read_traces(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        read_traces(tmp_path / "none.json")
