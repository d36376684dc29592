"""One rank of a part of `benchmarks.gpu`: `rank.py PART ROWS SECONDS [--dry]`, started by `weft run`.

Contenders live in one process and take turns, so that nothing but their own code differs. Rank 0 appends what was found
to the file ROWS, a line of JSON each. A step: forget the gradients, forward and backward pass of a mini-batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import weft.torch as weft
from benchmarks import machine
from benchmarks.contenders import SMALL
from benchmarks.gpt import GPT, GPTConfig, next_token_loss

DRY = "--dry" in sys.argv
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPT_350M = GPTConfig(blocks=24, width=1024, heads=16, context=1024, vocabulary=50_304)
CONFIG = SMALL if DRY else GPT_350M
ROWS = 8
MICROBATCHES = 2 if DRY else 4
WARM_UP, MOST_ROUNDS = 3, 2 if DRY else 50
TOLERANCE = 0.03
"""Between gradient norms of two contenders in bf16."""
REHEARSED = "A100-80"

Step = Callable[[], Any]
begun_s = time.monotonic()


def tell(**row: Any) -> None:
    """A row of the table, from the first rank."""
    if int(os.environ.get("RANK", 0)) == 0:
        with open(sys.argv[2], "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def bf16() -> Any:
    return torch.autocast(DEVICE.type, torch.bfloat16)


def batch(rows: int = ROWS, config: GPTConfig = CONFIG) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(20)
    ids = torch.randint(config.vocabulary, (rows, config.context + 1), generator=numbers).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def gpt(config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(20)
    return GPT(config).to(DEVICE)


def plain(model: nn.Module, data: tuple[Tensor, Tensor], microbatches: int = MICROBATCHES) -> Step:
    """Plain PyTorch accumulates the gradients of the same microbatches; DDP averages those of the last one's pass."""

    def step() -> None:
        model.zero_grad()
        parts = list(zip(*(each.chunk(microbatches) for each in data), strict=True))
        for number, (ids, targets) in enumerate(parts, 1):
            last = number == len(parts) or not isinstance(model, DistributedDataParallel)
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                with bf16():
                    loss = next_token_loss(model(ids), targets)
                (loss / microbatches).backward()

    return step


def split(net: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[Step, Any]:
    """weft, by the settings of its `init`."""
    model = weft.DistributedModel(net)

    @weft.step
    def train_step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        with bf16():
            loss = next_token_loss(model(ids), targets)
        model.backward(loss)
        return loss

    def step() -> None:
        model.zero_grad()
        train_step(model, *data)

    return step, model


def turns(contenders: dict[str, Step]) -> dict[str, float]:
    """The median milliseconds of each one's step, in turns, until the time is over on the first rank."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in list(contenders.values()) * WARM_UP:
        step()
    finish()
    for _ in range(MOST_ROUNDS):
        for name, step in contenders.items():
            if dist.is_initialized():
                dist.barrier()
            began_s = time.perf_counter()
            step()
            finish()
            times[name].append(time.perf_counter() - began_s)
        over = torch.tensor(float(time.monotonic() - begun_s > float(sys.argv[3])))
        if dist.is_initialized():
            dist.broadcast(over, 0)
        if over:
            break
    return {name: 1e3 * median(each) for name, each in times.items()}


def compare(contenders: dict[str, Step], note: str = "") -> None:
    """Rows for all contenders but the first, which they are beside."""
    found = turns(contenders)
    (name, base), *others = found.items()
    for other, took in others:
        tell(what=other, value=took, unit="ms", beside=name, base=base, note=note)


def norm(parameters: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def alike(one: float, other: float) -> None:
    if abs(one / other - 1) > TOLERANCE:
        tell(what="gradients differ", value=one, beside="plain PyTorch", base=other, failed=True)


def one_partition(compiled: bool) -> None:
    weft.init({"partitions": 1, "microbatches": MICROBATCHES, "verify": "off"})
    data = batch()
    nets = [gpt() for _ in range(4)]
    if compiled:
        for net in nets:
            net.compile(backend="eager" if DRY else "inductor")
    dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nets[2])
    step, model = split(nets[3], data)
    first = plain(nets[0], data)
    steps = {"plain PyTorch": first, "again": plain(nets[1], data), "DDP": plain(ddp, data), "weft": step}
    compare(steps, f"{MICROBATCHES} microbatches of {ROWS // MICROBATCHES} x {CONFIG.context}")
    alike(norm(model.parameters()), norm(nets[0].parameters()))
    dist.destroy_process_group()


def eager() -> None:
    one_partition(False)


def compiled() -> None:
    one_partition(True)


def replicas() -> None:
    """weft's replicas beside DDP: over NCCL if each rank has a GPU, else over gloo."""
    weft.init({"partitions": 1, "microbatches": MICROBATCHES, "verify": "off"})
    data = batch()
    ddp = DistributedDataParallel(gpt(), process_group=group())
    step, model = split(gpt(), data)
    compare({"DDP": plain(ddp, data), "weft": step}, f"{weft.size()} ranks, {backend()}")
    alike(norm(model.parameters()), norm(ddp.parameters()))


def backend() -> str:
    return "nccl" if DEVICE.type == "cuda" and torch.cuda.device_count() >= weft.size() else "gloo"


def group() -> Any:
    return dist.new_group(backend=backend())


def pipeline() -> None:
    """Two ranks of a pipeline beside one process, whose steps the second one waits for."""
    weft.init({"partitions": 2, "microbatches": MICROBATCHES, "verify": "off"})
    data = batch()
    alone = plain(gpt(), data) if weft.rank() == 0 else nothing
    step, _ = split(gpt(), data)
    compare({"plain PyTorch, one process": alone, "weft, 1F1B": step}, f"{MICROBATCHES} microbatches")


def nothing() -> None:
    """The other rank's turn."""


def sharded(degree: str) -> None:
    """Two ranks that share each layer, or each sequence, beside `parallelize_module`."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from benchmarks.tensor_parallel.contenders import CutAttention

    weft.init({"partitions": 1, "microbatches": MICROBATCHES, "verify": "off", degree: 2})
    data = batch()
    peer, mesh = gpt(), DeviceMesh.from_group(group(), DEVICE.type)
    for block in peer.blocks:
        block.attention = CutAttention(block.attention, 2).to(DEVICE)
        columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        rows = {"attention.out": RowwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, mesh, {**columns, "mlp.0": ColwiseParallel(), **rows})
    step, _ = split(gpt(), data)
    compare({"parallelize_module": plain(peer, data), f'weft, "{degree}": 2': step}, backend())


def memory() -> None:
    """Trains with AdamW, and tells the most memory that tensors took; also rehearsed, which ends in the second step."""
    weft.init({"partitions": 1, "microbatches": MICROBATCHES, "verify": "off"})
    if DEVICE.type == "cpu":
        machine.reset_peak_rss()
    before = machine.rss_bytes()
    step, model = split(gpt(), batch())
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _ in range(3):
        step()
        optimizer.step()
    finish()
    most = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else machine.peak_rss_bytes() - before
    tell(bytes=most)


def rehearsed() -> None:
    """`rank.py rehearsed ARGUMENTS`: rehearses what these start, runs it, and tells both."""
    arguments = sys.argv[2:]
    script = arguments.index(str(Path(__file__)))
    rows = Path(arguments[script + 2])
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        asked = ["-m", "weft", "rehearse", "-n", "1", "--device", REHEARSED, "--json", str(answer)]
        subprocess.run([sys.executable, *asked, *arguments[script:]], check=True)
        subprocess.run([sys.executable, *arguments], check=True)
        told = sum(part["total"] - part["reserved"] for part in json.loads(answer.read_text())["parts"])
    most = json.loads(rows.read_text().splitlines()[-1])["bytes"]
    rows.unlink()
    sys.argv[2] = str(rows)
    note = "a rank with AdamW, " + (
        "resident, with what libraries take" if DRY else "the driver's share left out"
    )
    tell(
        what="weft rehearse", value=told / 2**20, unit="MiB", beside="measured", base=most / 2**20, note=note
    )


def host() -> None:
    """A step's time beside that of its kernels alone: what is more, the GPU waits for Python."""
    weft.init({"partitions": 1, "microbatches": MICROBATCHES, "verify": "off"})
    for name, config, rows in (
        ("8 blocks of 256", SMALL if DRY else GPTConfig(), 16),
        ("350M", CONFIG, ROWS),
    ):
        data = batch(rows, config)
        steps = {"plain PyTorch": plain(gpt(config), data), "weft": split(gpt(config), data)[0]}
        took = turns(steps)
        for who, step in steps.items():
            kind = ProfilerActivity.CUDA if DEVICE.type == "cuda" else ProfilerActivity.CPU
            with profile(activities=[kind]) as seen:
                step()
                finish()
            events = seen.key_averages()
            kernels_us = sum(
                e.self_device_time_total if DEVICE.type == "cuda" else e.self_cpu_time_total for e in events
            )
            tell(what=f"{who}, {name}", value=took[who], unit="ms", beside="kernels", base=kernels_us / 1e3)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (eager, compiled, replicas, pipeline, memory, rehearsed, host)
} | {
    degree: lambda degree=degree: sharded(degree)  # type: ignore[misc]
    for degree in ("tensor_parallel_degree", "context_parallel_degree")
}

if __name__ == "__main__":
    PARTS[sys.argv[1]]()
