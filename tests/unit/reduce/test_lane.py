"""A lane sends tensors straight, or through a compression that has a thread; see also `tests/parity`."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch

from weft.reduce.collective import Collective, Work
from weft.reduce.lane import Lane


class Done:
    def wait(self) -> None:
        return None


class Double:
    """Two ranks that have the same data."""

    size = 2

    def __init__(self) -> None:
        self.closed = False

    def all_reduce(self, flat: torch.Tensor) -> Work:
        flat.mul_(2)
        return Done()

    def close(self) -> None:
        self.closed = True


class Noted(NamedTuple):
    """A compression that notes its calls."""

    calls: list

    def init(self, numel, dtype, device, ranks):
        return [numel, dtype, ranks]

    def update(self, state, flat, collective):
        self.calls.append((tuple(state), threading.current_thread().name))
        sent = flat.clone()
        collective.all_reduce(sent).wait()
        return sent / collective.size


def test_without_compression_the_caller_divides():
    lane = Lane(Double())
    flat = torch.ones(4)
    lane.launch(0, flat.mul_(lane.scale)).wait()
    assert flat.tolist() == [1.0] * 4


def test_a_compression_has_a_thread_and_a_state_for_each_bucket():
    made: list = []
    collective = Double()
    lane = Lane(collective, Noted(made))
    assert lane.scale == 1.0
    flats = [torch.full((n,), 3.0) for n in (2, 5)]
    works = [lane.launch(number, flat) for number, flat in enumerate(flats)]
    for work in works:
        work.wait()
    assert [flat.tolist() for flat in flats] == [[3.0] * 2, [3.0] * 5]
    assert [state for state, _ in made] == [(2, torch.float32, 2), (5, torch.float32, 2)], "in order"
    assert {name for _, name in made} == {"weft-reduce_0"}
    lane.close()
    assert collective.closed


def test_what_a_compression_raises_is_raised_to_who_waits():
    class Broken(Noted):
        def update(self, state, flat, collective):
            raise ArithmeticError("no")

    lane = Lane(Double(), Broken([]))
    work = lane.launch(0, torch.ones(2))
    with pytest.raises(ArithmeticError, match="no"):
        work.wait()
    lane.close()


def test_the_port():
    assert isinstance(Double(), Collective) and isinstance(Done(), Work)
