"""Small networks, and their traces, for the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.torch.execution.thread_settings import rehearsal
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.record import Trace
from weft.torch.trace.trace import trace

CPU = torch.device("cpu")
WIDTH = 8


class Block(nn.Module):
    """A residual block [B, W] -> [B, W]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tied(nn.Module):
    """The first matrix is the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Leaking(nn.Module):
    """One block leaves a tensor in an attribute, and another reads it."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.inner(x)
            return torch.tanh(x)

    def __init__(self) -> None:
        super().__init__()
        self.writer = self.Writer()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.writer(x))
        assert self.writer.kept is not None
        return x * self.writer.kept


class Normed(nn.Module):
    """Writes buffers and plain attributes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(float(WIDTH)))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.drop(self.norm(x))) + self.table


def traced(net: nn.Module, rows: int = 4, backward: bool = True, split: bool = False) -> Trace:
    """One microbatch of a step that sums the network's result."""
    x = torch.randn(rows, WIDTH)

    def run() -> None:
        loss = net(x).sum()
        if backward:
            assert rehearsal() is not None
            rehearsal().backward([loss], [torch.ones_like(loss)])

    return trace(net, run, CPU, Snapshot([net], Streams(CPU)), split=split)
