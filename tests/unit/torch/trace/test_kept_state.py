"""What a script counts and collects is as before, wherever it does so."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.unit.torch.networks import CPU
from weft.torch.session.random_streams import Streams
from weft.torch.trace.dry_run import Snapshot

shapes: list[Any] = []
calls = 0


class Logs(nn.Module):
    """Tells a list of its file what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return count(x)


def count(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return x


@dataclass(slots=True)
class Totals:
    rows: int
    losses: list[float]


class Trains:
    """A step that is an object."""

    def __call__(self, x: torch.Tensor) -> None:
        count(x)


def runs(function: Any, *given: Any) -> None:
    with Snapshot([Logs()], Streams(CPU), function, *given).restored():
        function(*given)


def test_globals_that_a_forward_pass_writes() -> None:
    net = Logs()
    with Snapshot([net], Streams(CPU)).restored():
        net(torch.ones(1))
    assert shapes == [] and calls == 0


def test_globals_of_a_step_that_is_an_object_or_has_some_arguments() -> None:
    runs(Trains(), torch.ones(1))
    runs(functools.partial(count, torch.ones(1)))
    assert calls == 0


def test_objects_with_slots() -> None:
    totals = Totals(0, [])

    def step(totals: Totals) -> None:
        totals.rows += 1
        totals.losses.append(0.5)

    runs(step, totals)
    assert totals == Totals(0, [])


def test_arrays() -> None:
    bins, text = np.zeros(3), bytearray(b"ab")

    def step() -> None:
        bins[1] += 1
        text.append(0)

    runs(step)
    assert bins.tolist() == [0, 0, 0] and text == b"ab"


def test_numbers_of_a_class() -> None:
    class Counted(nn.Module):
        calls = 0

        @classmethod
        def count(cls) -> None:
            cls.calls += 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count()
            return x

    net = Counted()
    with Snapshot([net], Streams(CPU)).restored():
        net(torch.ones(1))
    assert Counted.calls == 0
