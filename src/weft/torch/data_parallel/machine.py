"""Measures what this machine's ranks do at once: products by size, copies, attention, sums over ranks.

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

import torch
import torch.distributed as dist
from torch.nn import functional

import weft.torch.data_parallel  # noqa: F401 - registers the backend that adds up gradients
from weft.torch.data_parallel import ranks as here

LEAST_S, ROUNDS, LONGEST_S = 0.02, 5, 0.5
WIDTHS = {"cpu": (64, 128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
MOVED_BYTES = {"cpu": (1 << 28, 1 << 29), "cuda": (1 << 28, 1 << 30)}
"""Far more than caches hold."""
SUMMED_BYTES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
SEQUENCES = {"cpu": (256, 512), "cuda": (1024, 4096)}
HEADS, HEAD = 8, 64
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
    copies, moves = [], []
    for size in MOVED_BYTES[kind]:
        x, y = (torch.zeros(size // wide.itemsize, dtype=wide, device=device) for _ in range(2))
        copies.append((2.0 * size, timed(device, lambda x=x, y=y: y.copy_(x))))  # type: ignore[misc]
        moves.append((2.0 * size, timed(device, lambda x=x: x.add_(1.0))))  # type: ignore[misc]
    attention = []
    for tokens in SEQUENCES[kind]:
        q = torch.randn(1, HEADS, tokens, HEAD, dtype=wide, device=device)
        flops = 4.0 * HEADS * tokens * tokens * HEAD
        attention.append((flops, timed(device, lambda q=q: functional.scaled_dot_product_attention(q, q, q))))  # type: ignore[misc]
    return {
        "weft": "measured machine", "version": 1,
        "device": name_of(device), "memory_bytes": memory_bytes(device, ranks),
        "products": products, "moves": moves, "copies": copies, "attention": attention,
        "sums": _sums(device) if ranks > 1 else [],
    }  # fmt: skip


def dtypes(kind: str) -> list[str]:
    """What products are measured in; a CPU's 16 bits are emulated by most."""
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
            a, b = torch.randn(high, width, device=device), torch.randn(width, wide, device=device)
            x, y = a.to(dtype), b.to(dtype)
            found.append((2.0 * high * width * wide, timed(device, lambda x=x, y=y: x @ y)))  # type: ignore[misc]
    return found


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
    """What a plan calls the device: the GPU's name, or the cores that a rank computes with."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu:{torch.get_num_threads()}"


def memory_bytes(device: torch.device, ranks: int) -> int:
    """What the device has; a rank on a CPU has its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def main(folder: str) -> None:
    """Measure on this rank, and write it into the folder."""
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


if __name__ == "__main__":
    main(sys.argv[1])
