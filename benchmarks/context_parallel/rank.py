"""One rank of `benchmarks.context_parallel`: the peak of its resident memory, the time of a step."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from benchmarks.shared_parameters.rank import settle, status


class Layer(nn.Module):
    """Causal attention, of which several heads may share keys and values, and two linears."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, own = heads, keys, width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, own * count) for count in (heads, keys, keys))
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q, k, v = (
            each(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in ((self.q, self.heads), (self.k, self.keys), (self.v, self.keys))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < self.heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "keys", "positions", "steps"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    weft.init({"microbatches": 1, "verify": "off"})
    weft.barrier()
    empty = settle()
    torch.manual_seed(0)
    layers = (Layer(given.width, given.heads, given.keys) for _ in range(given.layers))
    model = weft.DistributedModel(nn.Sequential(*layers))
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = (model(x) - x.roll(1, 1)).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(1, given.positions, given.width, generator=torch.Generator().manual_seed(0))
    took = []
    for number in range(2 + given.steps):
        if number == 2:
            settle()
        began = time.perf_counter()
        optimizer.zero_grad()
        step(model, x)
        optimizer.step()
        took.append(time.perf_counter() - began)
    if weft.rank() == 0:
        found = {"peak": status("VmHWM") - empty, "step_ms": statistics.median(took[2:]) * 1e3}
        print("figures " + json.dumps(found))


if __name__ == "__main__":
    main()
