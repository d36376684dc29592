"""One of two processes that talk through a real `TorchChannel`; `test_gloo.py` starts both.

    python -m tests.unit.transport.gloo_pair FILE CHECK...      with RANK 0 or 1

Each check has a group and a channel of its own: first one without shared memory, then one with it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import PeerError
from weft.transport.channel import ALIGNMENT, SPEC, VALUE, Key, Message
from weft.transport.payloads import POSTED_BYTES
from weft.transport.rings import RING_BYTES, Rings
from weft.transport.torch_dist import DTYPES, INLINE_BYTES, TorchChannel

LIMIT_S = 30.0
MESSAGES = 400
KEYS = 7
LARGE = 8 * 2**20  # numbers of 4 bytes: 32 MiB
RINGS: dict[TorchChannel, Rings | None] = {}
"""The memory that each channel has."""


def take(channel: TorchChannel, key: Key) -> Message:
    """The message, within LIMIT_S."""
    return channel.mailbox.receive(1 - channel.rank, key, LIMIT_S, f"{key} did not arrive")


def wait_for_failure(channel: TorchChannel) -> BaseException:
    deadline = time.monotonic() + LIMIT_S
    while channel.mailbox.failure is None:
        assert time.monotonic() < deadline, "no failure"
        channel.mailbox.wait(channel.mailbox.arrivals, 0.05)
    return channel.mailbox.failure


def messages_of(rank: int) -> list[Message]:
    """What a rank sends: many shapes, strides and dtypes, texts, and nothing at all."""
    choice = random.Random(rank)
    made = torch.Generator().manual_seed(rank)
    result = []
    for number in range(MESSAGES):
        key = Key(VALUE, 1, choice.randrange(3), choice.randrange(KEYS))
        kind = choice.random()
        if kind < 0.05:
            result.append(Message(key, flag=True))
        elif kind < 0.15:
            result.append(Message(key, text=f"number {number} " * choice.randrange(40)))
        else:
            shape = [choice.choice((0, 1, 2, 5, 17, 40)) for _ in range(choice.randrange(4))]
            dtype = choice.choice(DTYPES)
            bytes_ = torch.Size(shape).numel() * dtype.itemsize
            highest = 2 if dtype is torch.bool else 256
            raw = torch.randint(0, highest, (bytes_,), dtype=torch.uint8, generator=made)
            tensor = raw.view(dtype).reshape(shape)
            turned = tensor.transpose(0, -1) if choice.random() < 0.5 and shape else tensor
            result.append(Message(key, turned))
    return result


def same(got: Message, sent: Message) -> bool:
    if (got.key, got.text, got.flag) != (sent.key, sent.text, sent.flag):
        return False
    if sent.payload is None:
        return got.payload is None
    one, other = got.payload, sent.payload
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    plain = [t.clone(memory_format=torch.contiguous_format).view(-1) for t in (one, other)]
    return torch.equal(*(t.view(torch.uint8) for t in plain)) if one.numel() else True


def many_messages(channel: TorchChannel) -> None:
    for message in messages_of(channel.rank):
        channel.send(1 - channel.rank, message)
    expected: dict[Key, list[Message]] = {}
    for message in messages_of(1 - channel.rank):
        expected.setdefault(message.key, []).append(message)
    for key in sorted(expected, reverse=True):
        for message in expected[key]:
            assert same(take(channel, key), message), message
    assert channel.mailbox.arrivals == MESSAGES
    channel.flush()


def large_both_ways(channel: TorchChannel) -> None:
    """Four of 32 MiB each way, sent before anything is taken: neither direction may block the other."""
    mine = torch.full((LARGE,), float(channel.rank))
    for number in range(4):
        channel.send(1 - channel.rank, Message(Key(VALUE, 0, 0, number), mine + number))
    for number in reversed(range(4)):
        payload = take(channel, Key(VALUE, 0, 0, number)).payload
        assert payload.shape == (LARGE,)
        assert (payload == 1 - channel.rank + number).all()


def many_large(channel: TorchChannel) -> None:
    """More each way than a ring holds, of sizes and strides that differ, while the other side reads late."""
    sizes = [(300 + 37 * number % 600, 1024) for number in range(40)]
    for number, size in enumerate(sizes):
        payload = torch.arange(size[0] * size[1]).view(size) + channel.rank + number
        channel.send(
            1 - channel.rank, Message(Key(VALUE, 0, 0, number), payload.t() if number % 2 else payload)
        )
    for number, size in enumerate(sizes):
        payload = take(channel, Key(VALUE, 0, 0, number)).payload
        expected = torch.arange(size[0] * size[1]).view(size) + 1 - channel.rank + number
        assert torch.equal(payload, expected.t() if number % 2 else expected)
    if (rings := RINGS.get(channel)) is not None:
        assert rings.given(1 - channel.rank) > RING_BYTES


def payloads_are_aligned(channel: TorchChannel) -> None:
    """Through every carrier: headers, rings, and receives of gloo that were posted ahead or asked for."""
    sizes = (
        1,
        3,
        INLINE_BYTES // 4,
        INLINE_BYTES // 4 + 1,
        1000,
        1000,
        1001,
        3000,
        500,
        POSTED_BYTES // 4 + 1,
    )
    sent = [torch.arange(size, dtype=torch.int32) + channel.rank for size in sizes]
    for number, payload in enumerate(sent):
        channel.send(1 - channel.rank, Message(Key(VALUE, 0, 0, number), payload))
    got = [take(channel, Key(VALUE, 0, 0, number)).payload for number in range(len(sizes))]
    assert [payload.data_ptr() % ALIGNMENT for payload in got] == [0] * len(sizes)
    for payload in got:
        payload.zero_()  # nobody else has this memory
    assert all(payload[-1] == channel.rank + len(payload) - 1 for payload in sent)


def flush_means_sent(channel: TorchChannel) -> None:
    """After a flush the buffers may go: what was sent arrives even if the sender writes nothing more."""
    channel.flush()
    for number in range(10):
        channel.send(1 - channel.rank, Message(Key(VALUE, 0, 0, number), torch.arange(100_000) + number))
    channel.flush()
    for number in range(10):
        assert take(channel, Key(VALUE, 0, 0, number)).payload[-1] == 99_999 + number


def signatures_stay(channel: TorchChannel) -> None:
    key = Key(SPEC, 0, 0, 2**62 + 1)
    channel.send(1 - channel.rank, Message(key, text=f"from {channel.rank}"))
    for _ in range(2):
        assert take(channel, key).text == f"from {1 - channel.rank}"


def transfers_are_recorded(channel: TorchChannel) -> None:
    """Every message is told once by who sent it and once by who got it, with times that make sense."""
    peer, heard = 1 - channel.rank, []
    channel.record = lambda *transfer: heard.append(transfer)
    began = time.perf_counter()
    dist.barrier()  # nothing arrives before it is listened to
    sizes = {0: 1_000_000, 1: 3, 2: 0}
    for number, size in sizes.items():
        channel.send(peer, Message(Key(VALUE, 7, 1, number), torch.ones(size)))
    for number in sizes:
        take(channel, Key(VALUE, 7, 1, number))
    channel.flush()
    ended = time.perf_counter()
    expected = sorted((kind, peer, Key(VALUE, 7, 1, number)) for kind in ("recv", "send") for number in sizes)
    assert sorted(transfer[:3] for transfer in heard) == expected, heard
    assert all(began <= start <= end <= ended for *_, start, end in heard), heard
    channel.record = None


def abort_arrives(channel: TorchChannel) -> None:
    if channel.rank == 1:
        channel.abort("ValueError: the cause")
        channel.flush()
        return
    failure = wait_for_failure(channel)
    assert isinstance(failure, PeerError), failure
    assert (failure.rank, failure.text) == (1, "ValueError: the cause")


def peer_killed(channel: TorchChannel) -> None:
    """The last check: rank 1 ends here."""
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failure = wait_for_failure(channel)
    assert isinstance(failure, PeerError) and failure.rank == 1, failure
    assert "connection lost" in failure.text
    deadline = time.monotonic() + LIMIT_S
    try:
        while True:
            assert time.monotonic() < deadline, "sends to a rank that is gone go well"
            channel.send(1, Message(Key(VALUE, 0, 0, 0), torch.ones(1000)))
    except PeerError as error:
        assert error.rank == 1, error
    channel.abort("it is gone, so nobody hears this")


CHECKS: dict[str, Callable[[TorchChannel], None]] = {
    check.__name__: check
    for check in (
        many_messages, payloads_are_aligned, large_both_ways, many_large, flush_means_sent, signatures_stay,
        transfers_are_recorded, abort_arrives, peer_killed,
    )
}  # fmt: skip


def main(path: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{path}", timeout=timedelta(seconds=60), rank=rank, world_size=2)
    for name in names:
        for shared in (True,) if name == "peer_killed" else (False, True):
            group = dist.new_group([0, 1], backend="gloo")
            rings = Rings.connect(group) if shared else None
            channel = TorchChannel(group, torch.device("cpu"), rings=rings)
            RINGS[channel] = rings
            CHECKS[name](channel)
            channel.close()
            if name != "peer_killed":
                channel.join(10)
                left = [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-")]
                assert not left, f"threads of the channel stay: {left}"
        print(f"{name} passed", flush=True)
    os._exit(0)  # after a failure no group can be taken down in good order


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
