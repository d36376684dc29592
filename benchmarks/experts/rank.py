"""One rank of `benchmarks.experts`: its parameters, the peak of its resident memory, the time of a step."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import Tensor, nn

import weft.torch as weft
from benchmarks.shared_parameters.rank import MIB, settle, status


class Stacked(nn.Module):
    """Experts in one weight."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, nth = torch.where(chosen == number)
            made = nn.functional.gelu(x[rows] @ self.up[number]) @ self.down[number]
            result = result.index_add(0, rows, made * weights[rows, nth, None])
        return result


class Mixture(nn.Module):
    """Each token goes to two experts."""

    def __init__(self, width: int, experts: int, stacked: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts: nn.Module = Stacked(width, experts) if stacked else nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        if isinstance(self.experts, Stacked):
            return x + self.experts(flat, chosen, weights)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(flat[rows]) * weights[rows, nth, None])
        return x + result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind")
    for name in ("layers", "width", "experts", "tokens", "steps"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    weft.init({"microbatches": 1, "verify": "off"})
    weft.barrier()
    empty = settle()
    torch.manual_seed(0)
    stacked = given.kind == "one weight"
    layers = (Mixture(given.width, given.experts, stacked) for _ in range(given.layers))
    model = weft.DistributedModel(nn.Sequential(*layers))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x) - x.roll(1, 1)).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(given.tokens, given.width, generator=torch.Generator().manual_seed(weft.rank()))
    took = []
    for number in range(3 + given.steps):
        if number == 3:
            settle()
        began = time.perf_counter()
        optimizer.zero_grad()
        step(model, x)
        optimizer.step()
        took.append(time.perf_counter() - began)
    if weft.rank() == 0:
        held = sum(parameter.nbytes for parameter in model.local_parameters()) / MIB
        peak = status("VmHWM") - empty
        print(
            "figures "
            + json.dumps({"held": held, "peak": peak, "step_ms": statistics.median(took[3:]) * 1e3})
        )


if __name__ == "__main__":
    main()
