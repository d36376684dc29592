"""One rank: trains on two real data sets with and without compression, and tells each one's last loss.

By hand, from the root of the repository:

    PYTHONPATH=. python -m weft run -n 2 benchmarks/loss_parity/train.py --steps 100
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from benchmarks.gpt import GPT, GPTConfig
from weft.reduce.choice import choose
from weft.reduce.compression import make

CONTEXT, VOCABULARY = 32, 128
Batch = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def text_task() -> tuple[nn.Module, Batch, float]:
    """The next character of the source of three modules of Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    source = "".join(
        (library / name).read_text(encoding="utf-8") for name in ("argparse.py", "ast.py", "typing.py")
    )
    ids = torch.tensor([min(ord(character), VOCABULARY - 1) for character in source])

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(ids) - CONTEXT - 1, (16,), generator=generator)
        rows = torch.stack([ids[start : start + CONTEXT + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]

    config = GPTConfig(blocks=2, width=48, heads=4, context=CONTEXT, vocabulary=VOCABULARY)
    return GPT(config), batch, 3e-3


def digits_task() -> tuple[nn.Module, Batch, float]:
    """The 8x8 digits of scikit-learn."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(labels)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(x), (32,), generator=generator)
        return x[chosen], y[chosen]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, batch, 1e-3


TASKS = {"text": text_task, "digits": digits_task}


def final_loss(task: str, spec: str, steps: int, seed: int) -> float:
    """The mean loss of the last tenth of the steps, over all ranks."""
    torch.manual_seed(seed)
    model, batch, rate = TASKS[task]()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    collective = choose(dist.group.WORLD, "direct")
    numel = sum(each.numel() for each in model.parameters())
    compression = None if spec == "fp32" else make(spec)
    state = compression and compression.init(numel, torch.float32, torch.device("cpu"), collective.size)
    losses = []
    for _ in range(steps):
        inputs, targets = batch(generator)
        found = model(inputs)
        loss = F.cross_entropy(found.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [each.grad for each in model.parameters()]
        flat = torch.cat([each.flatten() for each in gradients])
        if compression is None:
            collective.all_reduce(flat.div_(collective.size)).wait()
        else:
            compression.update(state, flat, collective)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, steps // 10) :]).mean()
    collective.all_reduce(last.view(1)).wait()
    return float(last) / collective.size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--compressions", default="fp32,fp16,bf16,int8")
    given = parser.parse_args()
    torch.set_num_threads(1)
    weft.init({"partitions": 1})
    for task in given.tasks.split(","):
        for seed in map(int, given.seeds.split(",")):
            for spec in given.compressions.split(","):
                loss = final_loss(task, spec, given.steps, seed)
                if dist.get_rank() == 0:
                    line = {"task": task, "seed": seed, "compression": spec, "loss": loss}
                    print(json.dumps(line), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
