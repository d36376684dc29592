"""Times weft with one process and one partition against a plain loop.

All train the same GPT on the same slices of the same mini-batch, in turns of random order. The plain loop is there
twice, with a model each: how far those two are apart is what this machine cannot tell.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import weft.torch as weft
from benchmarks import machine
from benchmarks.gpt import GPT, GPTConfig, next_token_loss

MICROBATCHES = 4
TARGET = 1.02
GRADIENT_TOLERANCE = 1e-5
CPU_MODELS = {"8 blocks of 256": (GPTConfig(), 16)}
GPU_MODELS = {
    "8 blocks of 256": (GPTConfig(), 16),
    "8 blocks of 1024": (GPTConfig(width=1024, heads=16, context=512, vocabulary=8192), 32),
}
"""Configuration and batch size. The small one keeps a GPU waiting for Python: the harder test there."""


@dataclass(frozen=True)
class Sample:
    step_s: float
    other_cores: float


@dataclass(frozen=True)
class Row:
    device: str
    model: str
    plain_ms: float
    weft_ms: float
    ratio: float
    plain_again_ratio: float
    kept: int
    steps: int


def plain_loop(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    losses = []
    for part, wanted in zip(ids.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        loss = next_token_loss(model(part), wanted)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


@weft.step
def train_step(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    loss = next_token_loss(model(ids), targets)
    model.backward(loss)
    return loss


def weft_loop(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    model.zero_grad()
    return train_step(model, ids, targets).reduce_mean()


def timed(step: Callable[[], Tensor], device: str) -> Sample:
    busy_s, cpu_s, start_s = machine.busy_s(), time.process_time(), time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    step_s = time.perf_counter() - start_s
    others_s = machine.busy_s() - busy_s - (time.process_time() - cpu_s)
    return Sample(step_s, max(0.0, others_s) / step_s)


def quiet(samples: list[Sample], device: str) -> list[float]:
    """Steps that other processes left alone. A GPU machine has cores to spare, there all steps count."""
    return [s.step_s for s in samples if device == "cuda" or s.other_cores <= machine.QUIET_CORES]


def measure(device: str, name: str, config: GPTConfig, batch: int, steps: int) -> Row:
    torch.manual_seed(20)
    ids = torch.randint(config.vocabulary, (batch, config.context + 1), device=device)
    inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, again, whole = (GPT(config).to(device) for _ in range(3))
    again.load_state_dict(plain.state_dict())
    whole.load_state_dict(plain.state_dict())
    split = weft.DistributedModel(whole)

    runs = {
        "plain": lambda: plain_loop(plain, *inputs),
        "again": lambda: plain_loop(again, *inputs),
        "weft": lambda: weft_loop(split, *inputs),
    }
    for run in (*runs.values(), *runs.values()):
        timed(run, device)
    check_gradients(plain, split)
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    order = random.Random(21)
    for turn in range(steps):
        if device == "cpu" and turn % 5 == 0:
            machine.wait_until_quiet(patience_s=20)
        for contender in order.sample(sorted(runs), len(runs)):
            samples[contender].append(timed(runs[contender], device))
    kept = {contender: quiet(seen, device) for contender, seen in samples.items()}
    count = min(map(len, kept.values()))
    chosen = kept if count else {contender: [s.step_s for s in seen] for contender, seen in samples.items()}
    plain_s, again_s, weft_s = (median(chosen[contender]) for contender in runs)
    ratio = weft_s / median([*chosen["plain"], *chosen["again"]])
    return Row(device, name, plain_s * 1e3, weft_s * 1e3, ratio, again_s / plain_s, count, steps)


def check_gradients(plain: nn.Module, split: nn.Module) -> None:
    found = {name.removeprefix("module."): value.grad for name, value in split.local_named_parameters()}
    for name, parameter in plain.named_parameters():
        difference = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
        if not difference <= GRADIENT_TOLERANCE:
            raise SystemExit(f"the gradients of {name} differ by {difference:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps of each of the three")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: CPU, and GPU if there is one")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weft.init({"partitions": 1, "microbatches": MICROBATCHES})
    found = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    print(machine.machine_name() + (f", {torch.cuda.get_device_name()}" if "cuda" in found else ""))
    print("| device | model | plain ms | weft ms | ratio | plain again | kept |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    rows = []
    for device in [options.device] if options.device else found:
        for name, (config, batch) in (CPU_MODELS if device == "cpu" else GPU_MODELS).items():
            row = measure(device, name, config, batch, options.steps)
            verdict = f"{row.ratio:.3f}" + ("" if row.ratio <= TARGET else f" (above {TARGET})")
            figures = f"{row.plain_ms:.1f} | {row.weft_ms:.1f} | {verdict} | {row.plain_again_ratio:.3f}"
            print(f"| {device} | {name} | {figures} | {row.kept} of {row.steps} |", flush=True)
            rows.append(asdict(row))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
