"""Calls for CUDA on a machine without it: each public name works as a stand-in, or says what to leave out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.launching import SOURCE
from tests.unit.compat.test_names import python

NAMES = """
import inspect, json, torch, warnings
import weft.compat; weft.compat.enable()
import torch.cuda.profiler, torch.cuda.nvtx
warnings.simplefilter("ignore")
NO_CALLS = {
    "check_error", "classproperty", "CudaError", "DeferredCudaCallError", "AcceleratorError", "OutOfMemoryError",
}
wrong = []
for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.profiler):
    for name in sorted(set(dir(module)) - NO_CALLS):
        value = getattr(module, name)
        if name.startswith("_") or not callable(value) or not str(value.__module__).startswith(("torch", "weft")):
            continue
        try:
            needed = [
                p for p in inspect.signature(value).parameters.values()
                if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
        except (TypeError, ValueError):
            continue
        try:
            value(*[0] * len(needed))
        except Exception as error:
            text = str(error)
            if "weft" not in type(error).__module__ or not (" is for " in text and ": " in text):
                wrong.append(f"{module.__name__}.{name}: {type(error).__name__}: {text[:80]}")
print("RESULT" + json.dumps(wrong).replace(" ", "_"))
"""


def test_public_names_of_torch_cuda_answer_or_are_refused():
    (line,) = [line for line in python(NAMES, WEFT_DEVICE="cpu") if line.startswith("RESULT")]
    assert json.loads(line[6:]) == []


HABITS = {
    "devices": """
        x = torch.ones(2).cuda(0).to("cuda:1", non_blocking=True).to(torch.device("cuda", 1))
        assert x.get_device() == -1 and torch.zeros(2, device=x.get_device()).device.type == "cpu"
        x.record_stream(torch.cuda.current_stream())
        assert isinstance(torch.cuda.device, type) and isinstance(torch.cuda.Event, type)
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            torch.nn.utils.rnn.pack_sequence([x]).cuda()
        assert torch.nn.DataParallel(torch.nn.Linear(2, 1), device_ids=[0]).cuda()(torch.ones(3, 2)).shape == (3, 1)
    """,
    "memory": """
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.peak"] == stats["num_alloc_retries"] == stats["num_ooms"] == 0
        assert torch.cuda.memory.memory_stats(0) == stats and torch.cuda.memory.max_memory_allocated() == 0
        assert torch.cuda.memory_stats_as_nested_dict()["active_bytes"]["all"]["current"] == 0
        torch.cuda.memory.reset_peak_memory_stats(); torch.cuda.reset_max_memory_cached("cuda:0")
        assert torch.cuda.mem_get_info()[1] > 0 and isinstance(torch.cuda.memory_summary(), str)
    """,
    "profiling": """
        assert torch.cuda.cudart().cudaProfilerStart() == 0 == torch.cuda.cudart().cudaProfilerStop()
        torch.cuda.profiler.start(); torch.cuda.profiler.stop()
        with torch.cuda.nvtx.range("step"):
            torch.cuda.nvtx.range_push("forward"); torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("x"))
        assert torch.cuda.utilization() == torch.cuda.temperature() == 0
    """,
    "scaling": """
        net, data = torch.nn.Linear(4, 1).cuda(), torch.randn(8, 4, device="cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for scaler in (torch.cuda.amp.GradScaler(), torch.amp.GradScaler("cuda"), torch.amp.GradScaler()):
            assert scaler.is_enabled()
            with torch.autocast("cuda", dtype=torch.float16), torch.amp.autocast("cuda"):
                loss = net(data).float().pow(2).mean()
            scaler.scale(loss).backward(); scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """,
    "functions": """
        for fwd, bwd in ((torch.cuda.amp.custom_fwd, torch.cuda.amp.custom_bwd),
                         (torch.amp.custom_fwd(device_type="cuda"), torch.amp.custom_bwd(device_type="cuda"))):
            class Twice(torch.autograd.Function):
                @staticmethod
                @fwd
                def forward(ctx, x):
                    return 2 * x
                @staticmethod
                @bwd
                def backward(ctx, grad):
                    return 2 * grad
            x = torch.ones(2, requires_grad=True)
            Twice.apply(x).sum().backward()
            assert x.grad.tolist() == [2, 2]
        class Once(torch.autograd.Function):
            @staticmethod
            @torch.cuda.amp.custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x):
                return x.clone()
        with torch.cuda.amp.autocast():
            assert Once.apply(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    """,
    "loading": """
        import io
        for place in ("cuda:0", 0, torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda s, at: s.cuda(0), None):
            file = io.BytesIO(); torch.save({"a": torch.ones(2)}, file); file.seek(0)
            assert torch.load(file, map_location=place)["a"].sum() == 2, place
    """,
    "types": """
        assert isinstance(torch.ones(2), torch.cuda.FloatTensor) and torch.cuda.LongTensor([1]).item() == 1
        assert torch.ones(2).type(torch.cuda.HalfTensor).dtype == torch.float16
        assert torch.ones(2).type("torch.cuda.LongTensor").dtype == torch.int64
        graphed = torch.cuda.make_graphed_callables(torch.nn.Linear(2, 1), (torch.ones(1, 2),))
        assert graphed(torch.ones(1, 2)).shape == (1, 1)
    """,
    "one process": """
        import torch.distributed as dist, os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        assert dist.is_nccl_available()
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
        x = torch.ones(2).cuda()
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=dist.new_group([0], backend="nccl"))
        dist.barrier(device_ids=[0])
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), device_ids=[0], output_device=0)
        norm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
        assert isinstance(norm[0], torch.nn.SyncBatchNorm) and norm(torch.randn(4, 2)).shape == (4, 2)
        net(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()
    """,
}


REFUSED = {
    "torch.cuda.CUDAGraph()": "call what they would capture instead",
    "torch.cuda.graph(None)": "call what they would capture instead",
    "torch.cuda.caching_allocator_alloc(8)": "leave it out",
    "torch.cuda.nccl.all_reduce([torch.ones(1)])": "use torch.distributed",
}

EACH = """
import json, sys, textwrap, traceback
import weft.compat; weft.compat.enable()
import torch
found = {}
for name, code in json.loads(sys.stdin.read()).items():
    space = {"torch": torch}
    try:
        exec(textwrap.dedent(code), space)
        found[name] = ""
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """The traceback of each piece of code, all run in one process."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("SM_", "WEFT_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EACH],
        input=json.dumps({**HABITS, **{call: call for call in REFUSED}}),
        env={**environ, "PYTHONPATH": str(SOURCE), "WEFT_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_scripts_for_gpus(ended, habit):
    assert ended[habit] == ""


@pytest.mark.parametrize("call", REFUSED)
def test_what_has_no_meaning_on_a_cpu_is_refused(ended, call):
    last = ended[call].splitlines()[-1]
    assert last.startswith("weft.errors.UsageError: torch.cuda.") and REFUSED[call] in last
