"""Times weft with one process and one partition against a plain loop, on a GPU.

All train the same GPT on the same slices of the same mini-batch, in turns of random order. The plain loop is there
twice, with a model each: how far those two are apart is what this machine cannot tell.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor, nn

import weft.torch as weft
from benchmarks.gpt import GPT, GPTConfig, next_token_loss

MICROBATCHES = 4
TARGET = 1.02
GRADIENT_TOLERANCE = 1e-5
MODELS = {
    "8 blocks of 256": (GPTConfig(), 16),
    "8 blocks of 1024": (GPTConfig(width=1024, heads=16, context=512, vocabulary=8192), 32),
}
"""Configuration and batch size. The small one keeps a GPU waiting for Python: the harder test there."""


@dataclass(frozen=True)
class Row:
    model: str
    plain_ms: float
    weft_ms: float
    ratio: float
    plain_again_ratio: float
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


def timed(step: Callable[[], Tensor]) -> float:
    """Seconds until the GPU has finished."""
    start_s = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def measure(name: str, config: GPTConfig, batch: int, steps: int) -> Row:
    torch.manual_seed(20)
    ids = torch.randint(config.vocabulary, (batch, config.context + 1), device="cuda")
    inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain, again, whole = (GPT(config).cuda() for _ in range(3))
    again.load_state_dict(plain.state_dict())
    whole.load_state_dict(plain.state_dict())
    split = weft.DistributedModel(whole)

    runs = {
        "plain": lambda: plain_loop(plain, *inputs),
        "again": lambda: plain_loop(again, *inputs),
        "weft": lambda: weft_loop(split, *inputs),
    }
    for run in (*runs.values(), *runs.values()):
        timed(run)
    check_gradients(plain, split)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(21)
    for _ in range(steps):
        for contender in order.sample(sorted(runs), len(runs)):
            samples[contender].append(timed(runs[contender]))
    plain_s, again_s, weft_s = (median(samples[contender]) for contender in runs)
    ratio = weft_s / median([*samples["plain"], *samples["again"]])
    return Row(name, plain_s * 1e3, weft_s * 1e3, ratio, again_s / plain_s, steps)


def check_gradients(plain: nn.Module, split: nn.Module) -> None:
    found = {name.removeprefix("module."): value.grad for name, value in split.local_named_parameters()}
    for name, parameter in plain.named_parameters():
        difference = float((found[name] - parameter.grad).norm() / parameter.grad.norm())
        if not difference <= GRADIENT_TOLERANCE:
            raise SystemExit(f"the gradients of {name} differ by {difference:.1e}")


def table(steps: int) -> list[dict]:
    """Prints a row for each model, and returns them; nothing without a GPU."""
    if not torch.cuda.is_available():
        return []
    weft.init({"partitions": 1, "microbatches": MICROBATCHES})
    print(f"\n| {torch.cuda.get_device_name()} | plain ms | weft ms | ratio | plain again |")
    print("| --- | ---: | ---: | ---: | ---: |")
    rows = []
    for name, (config, batch) in MODELS.items():
        row = measure(name, config, batch, steps)
        verdict = f"{row.ratio:.3f}" + ("" if row.ratio <= TARGET else f" (above {TARGET})")
        print(
            f"| {name} | {row.plain_ms:.1f} | {row.weft_ms:.1f} | {verdict} | {row.plain_again_ratio:.3f} |",
            flush=True,
        )
        rows.append(asdict(row))
    return rows
