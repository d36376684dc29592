"""Pipes between two ranks; `gloo_pair.py` has them between two processes."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from weft.errors import PeerError, TransportError
from weft.transport.channel import VALUE, Key, Mailbox, Message
from weft.transport.payloads import Payloads
from weft.transport.pipes import Pipe
from weft.transport.segment import available
from weft.transport.torch_dist import WORDS, TorchChannel, header_of

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


def test_headers_without_room_keep_their_order():
    """They are written later by the thread that waits for sends, and those after them queue behind."""
    ours, theirs = Narrow(), Pipe()
    ours.connect(os.getpid(), theirs.number)
    theirs.connect(os.getpid(), ours.number)
    theirs.release_lent()
    ours.release_lent()
    channels = [bare(0, {1: ours}), bare(1, {0: theirs})]
    threads = [
        threading.Thread(target=channels[0]._reap, args=(1,), daemon=True),
        threading.Thread(target=channels[1]._receive, args=(0,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for number in range(200):
        channels[0].send(1, Message(Key(VALUE, 0, 0, 7), torch.tensor([number])))
    mailbox = channels[1].mailbox
    while mailbox.arrivals < 200:
        mailbox.wait(mailbox.arrivals, 5.0)
    arrived = [mailbox.take(0, Key(VALUE, 0, 0, 7)).payload.item() for _ in range(200)]
    assert arrived == list(range(200))
    ours.close()
    mailbox.wait(mailbox.arrivals, 5.0)
    assert isinstance(mailbox.failure, PeerError) and "at its other end is gone" in mailbox.failure.text
    theirs.close()
    channels[0]._pending[1].put(None)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_host_tensors_beside_a_gpu_stay_in_host_memory():
    """The header tells: what else comes goes to the receiver's device, or straight there."""
    sender, receiver = bare(0, {}), bare(1, {})
    sender.device = receiver.device = torch.device("cuda", 0)
    content = torch.arange(6.0).view(2, 3).t()
    words, payload, inline, direct = sender._pack(1, Message(Key(VALUE, 0, 0, 7), content))
    header = header_of(words, inline)
    assert payload is None and not direct
    message = receiver._unpack(0, header, WORDS.unpack_from(header), Payloads(None, 0))
    assert message.payload.device.type == "cpu" and torch.equal(message.payload, content)


def bare(rank: int, pipes: dict[int, Pipe]) -> TorchChannel:
    """A channel that has only pipes, without its threads."""
    channel = object.__new__(TorchChannel)
    channel.rank, channel.ranks, channel.device = rank, [0, 1], torch.device("cpu")
    channel._group, channel._direct, channel._rings, channel._pipes = None, {}, None, pipes
    channel._sent, channel._late, channel._closing = [0, 0], [0, 0], False
    channel._lock, channel.mailbox = threading.Lock(), Mailbox()
    channel._pending = [queue.SimpleQueue(), queue.SimpleQueue()]
    return channel
