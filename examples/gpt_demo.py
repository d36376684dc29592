"""Trains a small GPT on the source of Python's standard library, split over processes by weft.

    weft run -n 2 examples/gpt_demo.py                  # about two minutes on two cores
    weft run -n 2 examples/gpt_demo.py --quick          # about ten seconds: does it run?

Shows who got which part of the model, the loss as it falls, what share of the time each rank waited,
and a sample of what the model has learnt to write; draws one step as a picture.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from parts.python_source import Batches, Vocabulary, read_source
from parts.small_gpt import SmallGPT, generate
from torch.nn.functional import cross_entropy

import weft.torch as weft
from weft.report.picture import timeline_svg

PROMPT = "\n    def __init__(self, "
PEAK_RATE, WARM_UP_STEPS, STEPS_AT_LEAST = 3e-3, 20, 12
START_S = time.monotonic()


@weft.step
def train_step(model, ids, targets):
    loss = cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    model.backward(loss)
    return loss


@weft.step
def validation_step(model, ids, targets):
    return cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def show(text: str) -> None:
    if weft.rank() == 0:
        print(text, flush=True)


def train(model, optimizer, batches, held_out, seconds: float, bytes_per_token: float) -> float:
    """Train for `seconds`; the validation loss after the first step, which has split the model."""
    elapsed_s, shown_s, step, shown_step, first_loss = 0.0, 0.0, 0, 0, 0.0
    while elapsed_s < seconds or step < STEPS_AT_LEAST:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * max(0.05, min((step + 1) / WARM_UP_STEPS, 1.05 - elapsed_s / seconds))
        optimizer.zero_grad()
        loss = train_step(model, *batches.draw())
        weft.clip_grad_norm_(model, 1.0)
        optimizer.step()
        step += 1
        elapsed_s = weft.allgather(time.monotonic() - START_S, weft.WORLD)[0]  # so that all stop together
        if step == 1:
            show(weft.partition_report())
        if step == 1 or elapsed_s - shown_s > seconds / 20 or elapsed_s >= seconds:
            timeline = weft.recorded_timeline()
            idle = "  ".join(f"rank {rank} {timeline.idle_share(rank):3.0%}" for rank in timeline.ranks)
            tokens_per_s = (step - shown_step) * batches.batch * batches.length / (elapsed_s - shown_s)
            nats = loss.reduce_mean().item() / bytes_per_token
            show(f"step {step:4}  loss {nats:.3f} nats/byte  {tokens_per_s:6.0f} tokens/s  idle: {idle}")
            shown_s, shown_step = elapsed_s, step
        if step == 1:
            first_loss = validation_loss(model, held_out)
    return first_loss


def validation_loss(model, held_out) -> float:
    model.eval()
    with torch.no_grad():
        loss = validation_step(model, *Batches(held_out, 64, 128, seed=0).draw()).reduce_mean().item()
    model.train()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=110, help="how long to train")
    parser.add_argument("--quick", action="store_true", help="train for a few seconds")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for demo-step.svg")
    options = parser.parse_args()

    weft.init({"partitions": 2, "microbatches": 4, "optimize": "speed"})
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // weft.size()))
    torch.manual_seed(0)
    text = read_source(limit_bytes=1_000_000 if options.quick else 4_000_000)
    vocabulary = Vocabulary(text)
    ids = torch.tensor(vocabulary.encode(text))
    bytes_per_token = len(text.encode()) / len(ids)
    batches = Batches(ids[: -len(ids) // 20], batch=8, length=128, seed=0)
    held_out = ids[-len(ids) // 20 :]
    show(f"{len(text) / 1e6:.1f} MB of Python source, {len(ids)} tokens of {bytes_per_token:.1f} bytes each")

    model = weft.DistributedModel(SmallGPT(len(vocabulary)))
    adamw = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    optimizer = weft.DistributedOptimizer(adamw)
    seconds = 8 if options.quick else options.seconds
    before = train(model, optimizer, batches, held_out, seconds, bytes_per_token) / bytes_per_token
    timeline = weft.recorded_timeline()
    after = validation_loss(model, held_out) / bytes_per_token
    weights = model.state_dict()
    if weft.rank() == 0:
        copy = SmallGPT(len(vocabulary))
        copy.load_state_dict(weights)
        print(f"\nIt writes:\n{PROMPT}", end="")
        print(vocabulary.decode(generate(copy, vocabulary.encode(PROMPT), 40 if options.quick else 250)))
        picture = options.out / "demo-step.svg"
        picture.write_text(timeline_svg(timeline, "One training step of the demo"), encoding="utf-8")
        print(f"\nValidation loss {before:.3f} -> {after:.3f} nats/byte. One step as a picture: {picture}")
    if not after < 0.9 * before:
        raise SystemExit(f"the loss did not fall: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
