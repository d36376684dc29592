"""Small models with what makes data parallelism hard. Each makes its own batches; `step` may change what it uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 8, 16


class Net(nn.Module):
    """Batches are [ROWS, WIDTH] unless a model says otherwise."""

    def batch(self, numbers: torch.Generator) -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=numbers)


class Plain(Net):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.layers(x)


class Sometimes(Net):
    """A layer that never runs, one that every other step uses, and one that only even rows of data use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.other_steps = nn.Linear(WIDTH, WIDTH)
        self.by_data = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = torch.tanh(self.first(x))
        if step % 2:
            y = y + self.other_steps(y)
        if x[0, 0] > 0:  # so replicas differ
            y = y + self.by_data(y)
        return y


class Shifted(Net):
    """The gradients of its shifts are views of one that the rest of the backward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(ROWS, WIDTH))
        self.other = nn.Parameter(torch.zeros(WIDTH, ROWS))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.first(x)
        y = y.flatten() + self.shift.flatten() + self.other.flatten()
        return self.last(torch.tanh(y.view(ROWS, WIDTH)))


class Tied(Net):
    """Input and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embed.weight

    def batch(self, numbers: torch.Generator) -> Tensor:
        return torch.randint(32, (ROWS, 5), generator=numbers)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


class Twice(Net):
    """One module, used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.same(torch.tanh(self.between(torch.tanh(self.same(x)))))


class Mixed(Net):
    """Parameters of three dtypes, in turn, so that their gradients arrive mixed."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in dtypes)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Embedding(Net):
    """A table with sparse gradients, one with dense ones, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(50, WIDTH, sparse=True)
        self.dense = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def batch(self, numbers: torch.Generator) -> Tensor:
        return torch.randint(50, (ROWS, 3), generator=numbers)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.head(torch.tanh(self.sparse(x) + self.dense(x)))


class Convolutions(Net):
    """Convolutions and BatchNorm: buffers that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)

    def batch(self, numbers: torch.Generator) -> Tensor:
        return torch.randn(ROWS, 3, 6, 6, generator=numbers).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


class Wide(Net):
    """Enough values for an algorithm of weft's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, 64))

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.layers(x)
