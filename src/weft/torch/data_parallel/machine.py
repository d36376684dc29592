"""Measures what this machine's ranks do at once: products by size, what runs between them, attention, sums over ranks.

`weft plan --measure FILE` starts this module on each rank, with a folder, and makes a machine's file of what is in it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from weft.runtime.allocator import keep_memory
from weft.torch.data_parallel import ranks as here

Times = list[tuple[float, float]]
Timer = Callable[[torch.device, Callable[[], object]], float]
LEAST_S, ROUNDS, LONGEST_S = 0.02, 5, 0.5
WIDTHS = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
MOVED_BYTES = {"cpu": (1 << 28, 1 << 29), "cuda": (1 << 28, 1 << 30)}
"""Far more than caches hold."""
SUMMED_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
COLD_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Operands of products take turns until they have so many bytes, because in a step each product finds its own in no
cache."""
MOST_SETS = 64
TOKENS, WIDE, VOCABULARY = (
    {"cpu": 1024, "cuda": 8192},
    {"cpu": (256, 1024), "cuda": (2048, 8192)},
    {"cpu": 2048, "cuda": 32768},
)
NUMBERS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Parameters of an optimizer's step, in matrices of 2^18 (cpu) or 2^24 numbers."""
ATTENTION = {"cpu": ((8, 8, 128, 32), (4, 8, 256, 64)), "cuda": ((4, 16, 1024, 64), (1, 32, 4096, 128))}
"""Samples, heads, tokens, width of a head."""
SHARED, SHARED_WIDTHS = 4, {"cpu": (256, 1024, 2048), "cuda": (1024, 4096, 8192)}
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def measure(device: torch.device, ranks: int) -> dict[str, object]:
    """All of it, as JSON's types; see `weft.measure.machine.Measured`."""
    kind = device.type
    products: dict[str, list[tuple[float, float]]] = {}
    for name in dtypes(kind):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        products[name] = _products(device, TYPES[name], WIDTHS[kind])
    torch.backends.cuda.matmul.allow_tf32 = False
    wide = TYPES[list(products)[-1]]
    copies = []
    for size in MOVED_BYTES[kind]:
        x, y = (torch.zeros(size // wide.itemsize, dtype=wide, device=device) for _ in range(2))
        copies.append((2.0 * size, timed(device, lambda x=x, y=y: y.copy_(x))))  # type: ignore[misc]
        copies.append((2.0 * size, timed(device, lambda x=x: x.add_(1.0))))  # type: ignore[misc]
    moves = [*between(device, wide), loss(device), optimizer(device)]
    attention = [attended(device, wide, shape) for shape in ATTENTION[kind]]
    return {
        "weft": "measured machine", "version": 1,
        "device": name_of(device), "memory_bytes": memory_bytes(device, ranks),
        "products": products, "moves": moves, "copies": copies, "attention": attention,
        "sums": _sums(device) if ranks > 1 else [],
        "shared": shared(device) if ranks > 1 else [],
        "cut": exchanged(device, _seconds_on_all, along=False) if ranks > 1 else [],
        "tokens": exchanged(device, _seconds_on_all, along=True) if ranks > 1 else [],
    }  # fmt: skip


def dtypes(kind: str) -> list[str]:
    """The dtypes in which products are measured; a CPU's 16 bits are emulated by most."""
    if kind == "cpu":
        return ["fp32"]
    major, _ = torch.cuda.get_device_capability()
    return ["fp32", "tf32", "fp16", "bf16"] if major >= 8 else ["fp32", "fp16"]


def _products(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> list[tuple[float, float]]:
    """Square ones and such as layers have, up to `LONGEST_S`."""
    found: list[tuple[float, float]] = []
    for width in widths:
        for high, wide in ((width, width), (width, 4 * width)):
            if found and found[-1][1] * 2 * high * width * wide / found[-1][0] > LONGEST_S:
                continue
            one = dtype.itemsize * (high * width + width * wide + high * wide)
            sets = [
                (
                    torch.randn(high, width, device=device).to(dtype),
                    torch.randn(width, wide, device=device).to(dtype),
                )
                for _ in range(max(1, min(MOST_SETS, COLD_BYTES[device.type] // one)))
            ]

            def multiply(sets: list[tuple[torch.Tensor, torch.Tensor]] = sets) -> None:
                for x, y in sets:
                    x @ y

            found.append((2.0 * high * width * wide, timed(device, multiply) / len(sets)))
    return found


def between(device: torch.device, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Bytes and seconds of what runs between a layer's products, forward and backward: a norm, an activation, a
    residual sum. The bytes are those of `weft.plan.parallelism.layer.between_bytes`: 7 numbers forward, twice as
    many backward."""
    found = []
    for width in WIDE[device.type]:
        x, grad = (torch.randn(TOKENS[device.type], width, device=device).to(dtype) for _ in range(2))
        norm = torch.nn.LayerNorm(width, device=device, dtype=dtype)
        x.requires_grad_()

        def run(x: torch.Tensor = x, grad: torch.Tensor = grad, norm: torch.nn.Module = norm) -> None:
            x.grad = None
            (x + functional.gelu(norm(x))).backward(grad)

        found.append((21.0 * x.numel() * x.element_size(), timed(device, run)))
    return found


def loss(device: torch.device) -> tuple[float, float]:
    """Cross entropy, forward and backward: 20 bytes a number (`weft.plan.parallelism.step.head_times`)."""
    logits = torch.randn(TOKENS[device.type], VOCABULARY[device.type], device=device, requires_grad=True)
    labels = torch.randint(VOCABULARY[device.type], (TOKENS[device.type],), device=device)

    def run() -> None:
        logits.grad = None
        functional.cross_entropy(logits, labels).backward()

    return 20.0 * logits.numel(), timed(device, run)


def optimizer(device: torch.device) -> tuple[float, float]:
    """A step of Adam in 32 bits: 28 bytes a number (`weft.plan.parallelism.step.optimizer_s`)."""
    count = 16
    numbers = NUMBERS[device.type] // count
    parameters = [torch.zeros(numbers, device=device, requires_grad=True) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam = torch.optim.Adam(parameters, lr=1e-4)
    return 28.0 * numbers * count, timed(device, adam.step)


def attended(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> tuple[float, float]:
    """Fused causal attention, forward and backward: 3.5 times half of 4 T s a d FLOPs
    (`weft.plan.parallelism.layer.attention_times`)."""
    samples, heads, tokens, width = shape
    q, k, v, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_()

    def run() -> None:
        q.grad = k.grad = v.grad = None
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)

    return 3.5 * 2.0 * samples * heads * tokens * tokens * width, timed(device, run)


def _sums(device: torch.device) -> list[tuple[float, float]]:
    """All-reduces, as gradients have them; every rank makes as many."""
    found = []
    for size in SUMMED_BYTES:
        flat = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(ROUNDS + 2):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(flat)
            _finish(device)
            times.append(time.perf_counter() - began)
        found.append((float(size), statistics.median(times[2:])))
    return found


def shared(device: torch.device) -> list[tuple[float, float]]:
    """Parameters that ranks share: bytes of a layer, and what gathering it twice and scattering its gradients takes.

    Layers that share, less the same layers whole; of few samples, so that there is hardly anything to hide it behind.
    """
    from torch.distributed.device_mesh import DeviceMesh  # neither is loaded where nobody asks
    from torch.distributed.fsdp import fully_shard

    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("shard",))
    found = []
    for width in SHARED_WIDTHS[device.type]:
        layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, device=device) for _ in range(SHARED)))
        x = torch.randn(1, width, device=device)

        def run(layers: torch.nn.Module = layers, x: torch.Tensor = x) -> None:
            layers(x).sum().backward()

        whole = _seconds_on_all(device, run)
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(layers, mesh=mesh, reshard_after_forward=True)
        took = max(_seconds_on_all(device, run) - whole, 1e-9)
        found.append((4.0 * width * (width + 1), took / SHARED))
    return found


def _seconds_on_all(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks make as often: the median."""
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        began = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def timed(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds of a call: the median of rounds of at least `LEAST_S` each."""
    call()
    _finish(device)
    count = 1
    times: list[float] = []
    while len(times) < ROUNDS:
        began = time.perf_counter()
        for _ in range(count):
            call()
        _finish(device)
        took = time.perf_counter() - began
        if took < LEAST_S and not times:
            count *= 2
            continue
        times.append(took / count)
    return statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    """The name of the device in a plan: the GPU's name, or the cores that a rank computes with."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu:{torch.get_num_threads()}"


def memory_bytes(device: torch.device, ranks: int) -> int:
    """The device's memory in bytes; a rank on a CPU has its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def main(folder: str) -> None:
    """Measure on this rank, and write it into the folder."""
    keep_memory(os.environ)  # as training does
    ranks = here.size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", here.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("weft")
    found = measure(device, ranks)
    Path(folder, f"rank{here.rank()}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


PAIRS, INSIDE = 4, 8
"""Pairs of layers, and how wide a rank's part of them is inside: their products take next to nothing."""
SHAPES = {
    "cpu": ((4, 128, 64), (4, 128, 256), (8, 128, 512), (8, 128, 1024)),
    "cuda": ((4, 2048, 1024), (4, 2048, 4096), (4, 2048, 8192)),
}
"""Samples, tokens, width."""


def exchanged(device: torch.device, timer: Timer, along: bool) -> Times:
    """Bytes of what a pair of cut layers adds up, and what a sum takes: pairs that are cut, less whole ones.

    A pair adds up once in each pass. `along`: each rank has some of the tokens, so that a pair gathers tokens and hands
    out sums. Whole pairs are as narrow inside as a rank's part. `timer`: seconds of a call that all ranks make.
    """
    group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
    found = []
    for samples, tokens, width in SHAPES[device.type]:
        tokens = -(-tokens // group.size()) * group.size()
        x = torch.randn(samples, tokens, width, device=device, requires_grad=True)
        whole = timer(device, _Pass(_pairs(width, INSIDE, device), lambda x=x: x))  # type: ignore[misc]
        layers = _pairs(width, INSIDE * group.size(), device)
        took = timer(device, _Pass(layers, _cut(layers, x, group, along)))
        found.append((float(x.nbytes), max(took - whole, 1e-9) / (2 * PAIRS)))
    return found


class _Pass:
    """Forward and backward through layers."""

    def __init__(self, layers: nn.Module, inputs: Callable[[], Tensor]) -> None:
        self.layers, self.inputs = layers, inputs

    def __call__(self) -> None:
        from weft.torch.tensors import cut_weights

        cut_weights.ask(inside_unit=lambda: True, between_units=lambda: False)  # as in a step
        try:
            result: Any = self.layers(self.inputs())
            result = getattr(result, "part", result)
            result.backward(torch.ones_like(result))
        finally:
            cut_weights.ask(inside_unit=lambda: False, between_units=lambda: False)


def _pairs(width: int, inside: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, inside), nn.GELU(), nn.Linear(inside, width)) for _ in range(PAIRS))
    ).to(device)


def _cut(layers: nn.Module, x: Tensor, group: Any, along: bool) -> Callable[[], Tensor]:
    """Cut the layers; what gives their input."""
    from weft.torch.tensor_parallel import Linear, Region, Splits
    from weft.torch.tensor_parallel.apply import split  # it loads DTensor
    from weft.torch.tensor_parallel.sharded_activations import sharded_activation
    from weft.torch.tensors.shards import ShardPositions

    rank, ranks = group.rank(), group.size()
    linears = [{f"{at}.0": Linear("column"), f"{at}.2": Linear("row")} for at in range(PAIRS)]
    regions = tuple(Region(str(at), each) for at, each in enumerate(linears))
    rows = tuple(f"{at}.2" for at in range(PAIRS)) if along else ()
    shard_group = split(layers, Splits(ranks, regions, stays_sharded=rows), group, rank, ranks, x.device)
    if not along:
        return lambda: x
    shard = x.detach().chunk(ranks, 1)[rank].contiguous().requires_grad_()
    return lambda: sharded_activation(
        shard, shard_group, 1, ShardPositions.contiguous([shard.shape[1]] * ranks)
    )


if __name__ == "__main__":
    main(sys.argv[1])
