"""Random states: streams that nothing else disturbs."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
from collections.abc import Callable

import numpy
import pytest
import torch

from weft.torch.session.random_streams import NUMPY, PYTHON, TORCH, Streams, mix, same_states

CPU = torch.device("cpu")
ALL = TORCH | PYTHON | NUMPY


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


@pytest.fixture(autouse=True)
def as_before():
    streams = Streams(CPU, numpy=True)
    states = streams.capture(ALL)
    yield
    streams.restore(states)


@pytest.mark.parametrize("which", [TORCH, PYTHON, NUMPY, TORCH | NUMPY, ALL])
def test_captured_states_come_back_and_others_move_on(which: int):
    streams = Streams(CPU)
    before = streams.capture(which)
    first = draw()
    streams.restore(before)
    second = draw()
    for stream, one, other in zip((TORCH, PYTHON, NUMPY), first, second, strict=True):
        assert (one == other) == bool(which & stream)


def test_numpy_counts_only_where_it_is_asked_for():
    assert Streams(CPU).capture()[2] is None
    assert Streams(CPU, numpy=True).capture()[2] is not None


def test_a_seed_decides_what_is_drawn():
    streams = Streams(CPU, numpy=True)
    streams.seed(2**62 + 3, ALL)
    first = draw()
    streams.seed(2**62 + 3, ALL)
    assert draw() == first
    streams.seed(2**62 + 4, ALL)
    assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_a_stream_of_its_own_leaves_the_present_one_alone():
    streams = Streams(CPU)
    before = streams.capture(ALL)
    expected = draw()
    streams.restore(before)
    with streams.own(7, ALL):
        inside = draw()
        with streams.own(8, ALL):
            draw()
    assert draw() == expected
    with streams.own(7, ALL):
        assert draw() == inside


def test_a_stream_of_its_own_ends_with_an_error_too():
    streams = Streams(CPU)
    before = streams.capture(ALL)
    with pytest.raises(ValueError), streams.own(7, ALL):
        draw()
        raise ValueError
    assert same_states(before, streams.capture(ALL))


def test_drawing_a_seed_moves_the_callers_stream_by_one_number():
    streams = Streams(CPU)
    torch.manual_seed(5)
    seeds = [streams.draw() for _ in range(3)]
    torch.manual_seed(5)
    assert [streams.draw() for _ in range(3)] == seeds
    assert len(set(seeds)) == 3 and all(seed >= 0 for seed in seeds)


@pytest.mark.parametrize(
    ("draws", "numpy_too", "expected"),
    [
        (lambda: None, True, False),
        (lambda: torch.rand(()), False, True),
        (lambda: random.random(), False, True),
        (lambda: random.gauss(0, 1), False, True),
        (lambda: numpy.random.rand(), True, True),
        (lambda: numpy.random.rand(), False, False),
    ],
    ids=["nothing", "torch", "python", "gauss", "numpy", "numpy that does not count"],
)
def test_streams_know_whether_they_were_drawn_from(
    draws: Callable[[], object], numpy_too: bool, expected: bool
):
    streams = Streams(CPU, numpy=numpy_too)
    streams.seed(11)
    draws()
    assert streams.has_drawn_since(11) == expected


def test_states_are_compared_by_content():
    streams = Streams(CPU)
    before = streams.capture(ALL)
    assert same_states(before, streams.capture(ALL))
    for move in (lambda: torch.rand(()), random.random, numpy.random.rand):
        streams.restore(before)
        move()
        assert not same_states(before, streams.capture(ALL))


def test_mixed_seeds_are_the_same_in_every_process_and_differ_by_part():
    assert mix(1, "layer", 2) == mix(1, "layer", 2)
    seeds = {mix(1, 2), mix(2, 1), mix(12), mix("1", 2), mix(1, "2"), mix(1, 2, 0)}
    assert len(seeds) == 6
    program = "from weft.torch.session.random_streams import mix; print(mix(1, 'layer', 2))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mix(1, "layer", 2) < 2**63


def test_loading_numpys_generator_is_not_drawing(monkeypatch):
    """NumPy loads it at its first use: `torch._dynamo` does so in the middle of a module."""
    import numpy

    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    monkeypatch.delattr(numpy, "random", raising=False)
    streams = Streams(torch.device("cpu"))
    before = streams.capture(NUMPY)
    importlib.import_module("numpy.random")
    assert same_states(before, streams.capture(NUMPY))
