"""A job with its optimizer states, activations and weights outside of the device, or none: step and peak memory.

    python -m benchmarks.offload

Two partitions, 8 microbatches (GPipe, so that all of them wait), AdamW, one thread a rank, in turn. Memory is the most
that a rank had resident in a step after the second one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import weft.torch as weft
from benchmarks import machine

MIB = 2**20
WIDTH, LAYERS, TOKENS, MICROBATCHES, STEPS = 1024, 6, 256, 8, 5
PARTS = {
    "nothing": [], "optimizer": ["optimizer"], "activations": ["activations"], "weights": ["weights"],
    "optimizer, activations": ["optimizer", "activations"],
    "all three": ["optimizer", "activations", "weights"],
    "nothing, frozen": [], "weights, frozen": ["weights"],
}  # fmt: skip
"""What is offloaded. Frozen: only the norms are trained."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def rank(way: str) -> None:
    """One rank of the job; the last lines that it prints are figures."""
    weft.init(
        partitions=2,
        microbatches=MICROBATCHES,
        pipeline="gpipe",
        optimize="speed",
        offload=dict.fromkeys(PARTS[way], True),
    )
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    for block in net if "frozen" in way else ():
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    model = weft.DistributedModel(net)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(trained, lr=1e-3))

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x, times = torch.randn(MICROBATCHES, TOKENS, WIDTH), []
    for number in range(STEPS):
        if number == 2:
            machine.reset_peak_rss()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = step(model, x)
        optimizer.step()
        times.append(time.perf_counter() - began)
    found = {"seconds": min(times[2:]), "bytes": machine.peak_rss_bytes(), "loss": float(loss.reduce_mean())}
    Path(os.environ["FOUND"], str(weft.rank())).write_text(json.dumps(found))


def main() -> None:
    print(machine.machine_name(), end="\n\n")
    print("| offloaded | step s | ratio | peak MiB of a rank | ratio | loss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    first: tuple[float, float] | None = None
    for way in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *"-m weft run -n 2 --quiet -m benchmarks.offload".split(), way]
            environ = os.environ | {"FOUND": folder, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
            ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
        seconds, most = (max(each[name] for each in ranks) for name in ("seconds", "bytes"))
        first = first if first and not way.startswith("nothing") else (seconds, most)
        print(
            f"| {way} | {seconds:.2f} | {seconds / first[0]:.2f} | {most / MIB:.0f} | {most / first[1]:.2f} "
            f"| {ranks[-1]['loss']:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    rank(sys.argv[1]) if sys.argv[1:] else main()
