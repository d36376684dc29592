"""A queue sends tensors straight, or through a compression on channels with a thread each; see also `tests/parity`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from weft.reduce import all_reduce_queue as lanes
from weft.reduce import channels
from weft.reduce.all_reduce_queue import AllReduceQueue
from weft.reduce.channels import Channels
from weft.reduce.choice import BySize
from weft.reduce.collective import Collective, Work
from weft.reduce.compression import Compression


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
    divisible = True

    def init(self, numel, dtype, device, ranks):
        return [numel, dtype, ranks]

    def update(self, state, flat, collective):
        self.calls.append((tuple(state), collective))
        sent = flat.clone()
        collective.all_reduce(sent).wait()
        return sent / collective.size


class Pieces(Double):
    """Sums where tensors are, too."""

    def sum_pieces(self, tensors, scale):
        for tensor in tensors:
            tensor.mul_(2 * scale)
        return Done()


def test_who_can_average_in_place_is_found(monkeypatch: pytest.MonkeyPatch):
    able = Pieces()
    assert AllReduceQueue(able).in_place(100) is able
    assert AllReduceQueue(Double()).in_place(100) is None
    assert AllReduceQueue(able, Noted([])).in_place(100) is None, "a compression takes flat tensors"
    monkeypatch.setattr(BySize, "size", 2)
    queue = AllReduceQueue(BySize(None, [(1000, Double()), (2000, able)]))
    assert queue.in_place(1000) is None
    assert queue.in_place(1001) is queue.in_place(5000) is able


def test_without_compression_the_caller_divides():
    queue = AllReduceQueue(Double())
    flat = torch.ones(4)
    queue.launch(0, flat.mul_(queue.scale)).wait()
    assert flat.tolist() == [1.0] * 4


def test_a_compression_has_a_state_for_each_bucket():
    made: list = []
    collective = Double()
    queue = AllReduceQueue(collective, Noted(made))
    assert queue.scale == 1.0
    flats = [torch.full((n,), 3.0) for n in (2, 5)]
    works = [queue.launch(number, flat) for number, flat in enumerate(flats)]
    for work in works:
        work.wait()
    assert [flat.tolist() for flat in flats] == [[3.0] * 2, [3.0] * 5]
    assert [state for state, _ in made] == [(2, torch.float32, 2), (5, torch.float32, 2)], "in order"
    queue.close()
    assert collective.closed


def test_pieces_take_tracks_in_turns_and_keep_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lanes, "COMPRESSED_BYTES", 16)
    made: list = []
    several = Channels(None, [Double(), Double()])  # type: ignore[arg-type]
    queue = AllReduceQueue(several, Noted(made))
    for _ in range(2):
        flats = [torch.full((n,), 3.0) for n in (11, 4)]
        for work in [queue.launch(number, flat) for number, flat in enumerate(flats)]:
            work.wait()
        assert [flat.tolist() for flat in flats] == [[3.0] * 11, [3.0] * 4]
    for index, channel in enumerate(several.channels):
        assert [state[0] for state, used in made if used is channel] == [[3, 4], [4, 4]][index] * 2
    made.clear()
    whole = Noted(made)
    queue.compression = Compression(whole.init, whole.update)
    queue.launch(2, torch.ones(11)).wait()
    assert [state[0] for state, _ in made] == [11], "what is not divisible stays whole"
    queue.close()
    assert all(channel.closed for channel in several.channels)


def test_sums_take_tracks_in_turns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channels, "PIECE_BYTES", 16)
    several = Channels(None, [Double(), Double()])  # type: ignore[arg-type]
    assert isinstance(several, Collective) and several.size == 2
    assert channels.channels_of(several) == several.channels and channels.channels_of(
        several.channels[0]
    ) == (several.channels[0],)
    flat = torch.ones(11)
    several.all_reduce(flat).wait()
    assert flat.tolist() == [2.0] * 11
    assert several._next == 1, "three pieces"
    several.all_reduce(flat[:0]).wait()
    several.close()


def test_what_a_compression_raises_is_raised_to_who_waits():
    class Broken(Noted):
        def update(self, state, flat, collective):
            raise ArithmeticError("no")

    queue = AllReduceQueue(Double(), Broken([]))
    work = queue.launch(0, torch.ones(2))
    with pytest.raises(ArithmeticError, match="no"):
        work.wait()
    queue.close()


def test_the_port():
    assert isinstance(Double(), Collective) and isinstance(Done(), Work)
