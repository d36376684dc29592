"""Head and loss of a language model in chunks of tokens, beside plain PyTorch: time and peak memory.

    python -m benchmarks.chunked_loss

Forward and backward pass of a linear layer and a shifted cross entropy in single precision, in a process each, in turn.
Memory is the peak of resident memory above what was resident before the first pass, gradients of the weight included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import machine
from weft.torch.tensors.deferred_logits import Use, deferred_linear

MIB = 2**20
SIZES = [(32_000, 512, 4096), (128_256, 512, 4096)]
"""Words, numbers of a token, tokens of a microbatch."""
ROUNDS = 3


def one(chunked: bool, words: int, width: int, tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """The shortest pass, in seconds, and the peak of memory, in bytes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    head = nn.Linear(width, words, bias=False).to(dtype)
    x = torch.randn(2, tokens // 2, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, words, (2, tokens // 2))
    machine.reset_peak_rss()
    use = Use()
    base, times = machine.rss_bytes(), []
    for _ in range(ROUNDS):
        head.zero_grad()
        begun = time.perf_counter()
        logits = deferred_linear(x, head.weight, None, use) if chunked else head(x)
        rows = logits.float()[..., :-1, :].contiguous().view(-1, words)
        F.cross_entropy(rows, labels[..., 1:].reshape(-1)).backward()
        times.append(time.perf_counter() - begun)
        del logits, rows
    return {"seconds": min(times), "bytes": machine.peak_rss_bytes() - base}


def main() -> None:
    print(machine.machine_name(), end="\n\n")
    print("| words | tokens | dtype | plain s | in chunks s | ratio | plain MiB | in chunks MiB | ratio |")
    print("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for words, width, tokens in SIZES:
        for dtype in ("float32", "bfloat16"):
            found = []
            for chunked in (0, 1):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.chunked_loss",
                    *map(str, (chunked, words, width, tokens)),
                    dtype,
                ]
                found.append(
                    json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                )
            plain, own = found
            print(
                f"| {words} | {tokens} | {dtype} | {plain['seconds']:.1f} | {own['seconds']:.1f} "
                f"| {own['seconds'] / plain['seconds']:.2f} | {plain['bytes'] / MIB:.0f} | {own['bytes'] / MIB:.0f} "
                f"| {plain['bytes'] / own['bytes']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:]:
        chunked, words, width, tokens = map(int, sys.argv[1:5])
        print(json.dumps(one(bool(chunked), words, width, tokens, getattr(torch, sys.argv[5]))))
    else:
        main()
