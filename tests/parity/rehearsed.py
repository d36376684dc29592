"""Models that are rehearsed, and run on two processes: `rehearsed.py NAME`; a real run prints what its plan expects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.torch as weft
from tests import models

WIDTH = 64


class Block(nn.Module):
    """A transformer's block, with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


def perceptron() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4))
    ), (torch.randn(32, 256))


def convolutions() -> tuple[nn.Module, Tensor]:
    layers = [
        nn.Sequential(nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for n in (3, 16, 16, 16)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)), torch.randn(
        16, 3, 32, 32
    )


def blocks() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block() for _ in range(6))), torch.randn(8, 128, WIDTH)


def recurrent() -> tuple[nn.Module, Tensor]:
    net = models.Composed(
        lambda net, x: net.head(net.two(net.one(x)[0])[0]),
        one=nn.GRU(32, 64, batch_first=True), two=nn.GRU(64, 64, batch_first=True), head=nn.Linear(64, 8),
    )  # fmt: skip
    return net, torch.randn(16, 24, 32)


def tied() -> tuple[nn.Module, Tensor]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 512, bias=False), nn.Linear(512, WIDTH, bias=False)
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))
            self.back = nn.Linear(512, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks(self.back(F.gelu(self.first(x))))
            return F.linear(F.linear(x, self.first.weight), self.last.weight)

    return Tied(), torch.randn(8, 128, WIDTH)


def mixture() -> tuple[nn.Module, Tensor]:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 4)
            self.up = nn.Parameter(torch.randn(4, WIDTH, 256) / 8)
            self.down = nn.Parameter(torch.randn(4, 256, WIDTH) / 16)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.reshape(-1, WIDTH)
            scores, chosen = self.router(flat).softmax(-1).max(-1)
            order = chosen.argsort()
            ends = torch.bincount(chosen, minlength=4).cumsum(0).to(torch.int32)
            rows = F.gelu(F.grouped_mm(flat[order], self.up, offs=ends))
            mixed = torch.zeros_like(flat).index_add(0, order, F.grouped_mm(rows, self.down, offs=ends))
            return x + (mixed * scores[:, None]).reshape(x.shape)

    return nn.Sequential(*(nn.Sequential(Block(), Experts()) for _ in range(3))), torch.randn(8, 128, WIDTH)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    each.__name__: each for each in (perceptron, convolutions, blocks, recurrent, tied, mixture)
}


def main(name: str, *habits: str) -> None:
    weft.init(partitions=2, microbatches=4, deterministic=True)
    torch.manual_seed(0)
    net, x = MODELS[name]()
    if "checkpointed" in habits:
        for each in net:
            weft.set_activation_checkpointing(each)
    if "frozen" in habits:
        for each in list(net)[:2]:
            each.requires_grad_(False)
    model = weft.DistributedModel(net)
    optimizer = weft.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @weft.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in habits):
            loss = model(x).float().square().mean()
        model.backward(loss)
        return loss

    for _ in range(2):
        step(model, x)
        optimizer.step()
        optimizer.zero_grad()
    owners, kept, trained = model.plan.owners(net), [0, 0], [0, 0]
    for name, parameter in net.named_parameters():
        kept[owners[name]] += parameter.nbytes
        trained[owners[name]] += parameter.nbytes * parameter.requires_grad
    held = weft.allgather(sum(each.nbytes for each in model.local_parameters()))
    mine = sum(
        each.nbytes for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)
    )
    states = weft.allgather(mine)
    expected = [part["memory_bytes"] for part in model.plan.planned["parts"]]
    if weft.rank() == 0:
        real = {
            "units": [[unit.name, unit.partition] for unit in model.plan.units], "weights": kept, "trained": trained,
            "states": states, "memory": expected, "held": held,
        }  # fmt: skip
        print("REAL " + json.dumps(real))


if __name__ == "__main__":
    main(*sys.argv[1:])
