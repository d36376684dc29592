"""Pipes between two ranks; `gloo_pair.py` has them between two processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from weft.errors import PeerError, TransportError
from weft.transport.channel import VALUE, Key, Message
from weft.transport.pipes import Pipe
from weft.transport.rings import Rings
from weft.transport.segment import available
from weft.transport.torch_dist import TorchChannel

from .wires import Group, Pair, Wire

pytestmark = pytest.mark.skipif(not available(), reason="pipes go with shared memory: Linux on x86-64")

HEADER = 512


@pytest.fixture
def pair() -> Iterator[tuple[Pipe, Pipe]]:
    """What two ranks hold, here in one process."""
    pipes = Pipe(), Pipe()
    for one, other in (pipes, pipes[::-1]):
        one.connect(os.getpid(), other.number)
    for pipe in pipes:
        pipe.release_lent()
    yield pipes
    for pipe in pipes:
        pipe.close()


def header(number: int) -> bytes:
    return number.to_bytes(4, "little") * (HEADER // 4)


def test_a_writer_never_waits_and_nothing_is_lost(pair: tuple[Pipe, Pipe]):
    first, second = pair
    written = 0
    while first.write(header(written)):
        written += 1
    assert written >= 64 << 10 >> 9, "a pipe holds 64 KiB at least"
    assert [second.read(HEADER) for _ in range(written)] == [header(number) for number in range(written)]
    assert first.write(header(written)), "there is room again"


def test_both_directions_are_apart(pair: tuple[Pipe, Pipe]):
    first, second = pair
    assert first.write(header(1)) and second.write(header(2))
    assert (first.read(HEADER), second.read(HEADER)) == (header(2), header(1))


def test_room_is_waited_for(pair: tuple[Pipe, Pipe]):
    first, second = pair
    written = 0
    while first.write(header(written)):
        written += 1
    reader = threading.Timer(0.1, lambda: [second.read(HEADER) for _ in range(written)])
    reader.start()
    first.wait_for_room()
    assert first.write(header(written))
    reader.join()
    assert second.read(HEADER) == header(written)


def test_the_end_of_one_is_seen_by_the_other(pair: tuple[Pipe, Pipe]):
    first, second = pair
    assert first.write(header(1)[:100])
    first.close()
    assert second.read(HEADER) == header(1)[:100], "what was written before is there, and then the end"
    assert second.read(HEADER) == b""
    with pytest.raises(BrokenPipeError):
        second.write(header(2))


def test_a_pipe_that_is_none_is_refused(tmp_path):
    pipe = Pipe()
    with pytest.raises(TransportError, match="cannot be opened"):
        pipe.connect(os.getpid(), 1 << 20)
    with open(tmp_path / "file", "w") as file, pytest.raises(TransportError, match="it is no pipe"):
        pipe.connect(os.getpid(), file.fileno())
    assert not pipe.writes
    pipe.close()


class Narrow(Pipe):
    """Has no room for every other header at first."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    def write(self, data: bytes | bytearray) -> bool:
        self.tries += 1
        return self.tries % 2 == 0 and super().write(data)


class PipesOnly(Rings):
    """Pipes to the other rank, and no shared memory."""

    def __init__(self, rank: int, pipe: Pipe) -> None:
        super().__init__(rank, {}, {1 - rank: pipe})


def test_headers_without_room_keep_their_order():
    """They are written later by the thread that waits for sends, and those after them queue behind."""
    ours, theirs = Narrow(), Pipe()
    ours.connect(os.getpid(), theirs.number)
    theirs.connect(os.getpid(), ours.number)
    theirs.release_lent()
    ours.release_lent()
    pair = Pair(rings=(PipesOnly(0, ours), PipesOnly(1, theirs)))
    for number in range(200):
        pair.channels[0].send(1, Message(Key(VALUE, 0, 0, 7), torch.tensor([number])))
    mailbox = pair.channels[1].mailbox
    while mailbox.arrivals < 200 and mailbox.failure is None:
        mailbox.wait(mailbox.arrivals, 5.0)
    arrived = [mailbox.take(0, Key(VALUE, 0, 0, 7)).payload.item() for _ in range(200)]
    assert arrived == list(range(200))
    assert not pair.wire.sent, "headers go through pipes alone"
    pair.close()
    assert not ours.writes and not theirs.writes, "the channels close their pipes"
    assert mailbox.failure is None


def test_a_pipe_whose_other_end_is_gone_is_told():
    """A rank that ended leaves nothing else than its pipes' ends."""
    ours, theirs, other = Pipe(), Pipe(), Pipe()
    ours.connect(os.getpid(), theirs.number)
    theirs.connect(os.getpid(), other.number)
    theirs.release_lent()
    other.release_lent()
    channel = TorchChannel(
        Group(1, Wire(), Wire()), torch.device("cpu"), rings=PipesOnly(1, theirs), ranks=[0, 1]
    )
    ours.close()
    channel.mailbox.wait(0, 60.0)
    assert isinstance(channel.mailbox.failure, PeerError)
    assert "at its other end is gone" in channel.mailbox.failure.text
    channel.close()
    channel.join()
    other.close()


def test_tensors_beside_the_device_stay_in_host_memory():
    """The header tells: what else comes goes to the receiver's device, or straight there. Here that has no memory."""
    pair = Pair("meta")
    content = torch.arange(6.0).view(2, 3).t()
    pair.channels[0].send(1, Message(Key(VALUE, 0, 0, 7), content))
    mailbox = pair.channels[1].mailbox
    mailbox.wait(0, 60.0)
    payload = mailbox.take(0, Key(VALUE, 0, 0, 7)).payload
    assert payload.device.type == "cpu" and torch.equal(payload, content)
    pair.close()
