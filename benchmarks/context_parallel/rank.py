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
        mixed = self.attended(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.keys < self.heads)


class InWindows(Layer):
    """The same in windows of 256 positions, by a mask."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(q.shape[-2])
        mask = (at <= at[:, None]) & (at > at[:, None] - 256)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.keys < self.heads)


class Convolved(nn.Module):
    """A gated convolution of four positions, and two linears, as in LFM2."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gates, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        first, second, given = self.gates(self.before(x)).mT.chunk(3, 1)
        mixed = second * self.conv(first * given)[..., : x.shape[1]]
        x = x + self.out(mixed.mT)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Scanned(nn.Module):
    """A layer of Mamba-2, of `transformers`."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Block

        sizes = {"hidden_size": width, "num_heads": 2 * heads, "head_dim": width // heads, "n_groups": 2}
        self.block = Mamba2Block(Mamba2Config(**sizes, state_size=32, chunk_size=64), 0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        return result


KINDS = {"attention": Layer, "windows": InWindows, "convolutions": Convolved, "scans": Scanned}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layers", "width", "heads", "keys", "positions", "steps"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--kind", choices=KINDS)
    given = parser.parse_args()
    weft.init({"microbatches": 1, "verify": "off"})
    weft.barrier()
    empty = settle()
    torch.manual_seed(0)
    layers = (KINDS[given.kind](given.width, given.heads, given.keys) for _ in range(given.layers))
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
