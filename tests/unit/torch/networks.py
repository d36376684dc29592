"""Small networks, and their traces, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tests import models
from weft.torch.execution.thread_settings import rehearsal
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import Snapshot
from weft.torch.trace.record import Trace
from weft.torch.trace.trace import trace

CPU = torch.device("cpu")
WIDTH = 8


class Block(models.Block):
    """A residual block [B, W] -> [B, W] of two linears."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width, between=torch.tanh, norm=None)


class Chain(models.Chain):
    def __init__(self, depth: int = 4, width: int = WIDTH) -> None:
        super().__init__(depth, lambda: Block(width))


class Tied(Chain):
    """The first matrix is the last one too."""

    def __init__(self) -> None:
        super().__init__(3)
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(self.first(x)))


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


def linears(names: Iterable[str]) -> dict[str, nn.Module]:
    """Linear layers by name, for `models.Composed`."""
    return {name: nn.Linear(WIDTH, WIDTH) for name in names}


def traced(net: nn.Module, rows: int = 4, backward: bool = True, split: bool = False) -> Trace:
    """One microbatch of a step that sums the network's result."""
    x = torch.randn(rows, WIDTH)

    def run() -> None:
        loss = net(x).sum()
        if backward:
            assert rehearsal() is not None
            rehearsal().backward([loss], [torch.ones_like(loss)])

    return trace(net, run, CPU, Snapshot([net], Streams(CPU)), split=split)
