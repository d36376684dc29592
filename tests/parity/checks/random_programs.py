"""Models whose forward is drawn at random: what happens between modules, in place and through views above all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .harness import RANKS, WIDTH, check, same_as_alone, seeded, trained_alone, vectors

PROGRAMS, LENGTH = 200, 9
WEIGHTS = [3, 4, 3, 2, 2, 1]
"""How often each kind of statement is drawn."""
PARTS = "abcd"
SCHEDULES = ["1f1b", "gpipe", "zb_h1", "list"]


class Draw(NamedTuple):
    """One statement: its kind, and numbers below 1 that choose what it works on."""

    kind: str
    first: float
    second: float
    how: float


class State:
    """The variables of a program: ``whole`` tensors [B, W], and ``views`` of any shape."""

    def __init__(self, parts: Any, x: Tensor) -> None:
        self.parts = parts
        self.whole = [parts.a(x) * 1.0]
        self.views: list[Tensor] = []

    def run(self, draw: Draw) -> None:
        t, o = pick(self.whole, draw.first), pick(self.whole, draw.second)
        view = pick(self.views, draw.first) if self.views else t[:, :1]
        made = pick(STATEMENTS[draw.kind], draw.how)(t, o, view)
        if draw.kind == "module":
            self.whole.append(
                getattr(self.parts, pick(PARTS, draw.how))(t.clone() if draw.second < 0.7 else t)
            )
        elif draw.kind == "same":
            self.whole.append(self.parts.same(t))
        elif draw.kind == "new":
            self.whole.append(made)
        elif draw.kind == "view" and made.numel():
            self.views.append(made)

    def result(self) -> Tensor:
        out = torch.stack([t.tanh() for t in self.whole[-6:]]).sum(0)
        for view in self.views[-4:]:
            out = out + view.tanh().mean()
        return out


def pick(items: Sequence[Any], number: float) -> Any:
    return items[int(number * len(items))]


def without_grad(t: Tensor) -> Tensor:
    with torch.no_grad():
        return t.add_(0.01)


def there_and_back(t: Tensor) -> Tensor:
    t.unsqueeze_(1)
    t *= torch.ones(t.shape[1], device=t.device) * 0.9
    return t.squeeze_(1)


def turned(t: Tensor) -> Tensor:
    t.t_()
    t[0] *= 0.9
    return t.t_()


def by_value(t: Tensor, o: Tensor) -> Tensor:
    return o * 0.9 if t.detach().sum().item() > 0 else t.mul_(0.9) + o


STATEMENTS: dict[str, list[Callable[[Tensor, Tensor, Tensor], Any]]] = {
    "module": [lambda t, o, v: None],
    "new": [
        lambda t, o, v: t * 0.5 + o.tanh(),
        lambda t, o, v: t.clone(),
        lambda t, o, v: o + v.mean(),
        lambda t, o, v: t.double().mul(0.5).float(),
        lambda t, o, v: torch.cat([t[:, : WIDTH // 2], o[:, WIDTH // 2 :]], 1),
        lambda t, o, v: torch.stack(t.split(WIDTH // 2, 1)).sum(0).repeat(1, 2) * 0.5,
        lambda t, o, v: torch.where(t > 0, o, t * 0.1),
        lambda t, o, v: there_and_back(t.clone()),
        lambda t, o, v: by_value(t, o),
    ],
    "view": [
        lambda t, o, v: t[:, 2:4],
        lambda t, o, v: t[-1],
        lambda t, o, v: t.t(),
        lambda t, o, v: t.view(-1)[1:5],
        lambda t, o, v: t.detach(),
        lambda t, o, v: t.detach()[:, 0],
        lambda t, o, v: t.unsqueeze(1),
        lambda t, o, v: t[:, ::2],
        lambda t, o, v: v[..., 0],
        lambda t, o, v: v[-1:],
    ],
    "write": [
        lambda t, o, v: t.mul_(0.8),
        lambda t, o, v: t.add_(o.tanh() * 0.3),
        lambda t, o, v: t.__setitem__((slice(None), 1), 0.3),
        lambda t, o, v: t.__setitem__(0, o[0] * 0.5),
        lambda t, o, v: t.__setitem__(o.detach() > 0.2, 0.1),
        lambda t, o, v: t[:, 2:5].mul_(0.5),
        lambda t, o, v: t.copy_(o * 0.9),
        lambda t, o, v: there_and_back(t),
        lambda t, o, v: turned(t),
        lambda t, o, v: without_grad(t),
    ],
    "write a view": [
        lambda t, o, v: v.mul_(0.7),
        lambda t, o, v: v.add_(o.mean()),
        lambda t, o, v: v.zero_(),
        lambda t, o, v: v.sub_(v.detach().mean() * 0.1),
        lambda t, o, v: v.add_(v * 0.1),
        lambda t, o, v: without_grad(v),
    ],
    "same": [lambda t, o, v: None],
}  # fmt: skip


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Drawn(nn.Module):
    """Four modules and a program that uses them."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Part() for _ in PARTS)
        self.same = nn.Sequential()  # returns its input
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        state = State(self, x)
        for draw in self.draws:
            state.run(draw)
        return state.result()


@check
def random_programs() -> int:
    ran = 0
    for seed in range(PROGRAMS):
        numbers = random.Random(seed)
        kinds = numbers.choices(list(STATEMENTS), WEIGHTS, k=LENGTH)
        draws = [Draw(kind, numbers.random(), numbers.random(), numbers.random()) for kind in kinds]
        places = {name: numbers.randrange(RANKS) for name in PARTS}
        places["d"] = (places["a"] + 1) % RANKS
        net, batches = seeded(Drawn, draws), vectors(steps=1)
        try:
            trained_alone(net, batches)
        except (RuntimeError, IndexError):  # no program: what autograd needed was written into, say
            continue
        try:
            same_as_alone(net, batches, places=places, pipeline=SCHEDULES[seed % len(SCHEDULES)])
        except Exception as error:
            raise AssertionError(f"program {seed} on {places}: {draws}") from error
        ran += 1
    assert ran > PROGRAMS // 3, ran
    return ran
