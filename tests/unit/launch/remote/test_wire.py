"""Messages of the launcher and the agents, out of bytes that come in any portions."""

from __future__ import annotations

import os
import struct

import pytest

from weft.errors import LaunchError
from weft.launch.remote.wire import MARK, Incoming, Outgoing, packed

MESSAGES = [({"kind": "output", "rank": 3}, b"\0\xff" * 9), ({"kind": "ping"}, b"")]
BYTES = b"".join(packed(*message) for message in MESSAGES)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_portions(size: int):
    incoming = Incoming()
    found = [message for at in range(0, len(BYTES), size) for message in incoming.feed(BYTES[at : at + size])]
    assert found == MESSAGES


def test_what_a_shell_says_before():
    incoming = Incoming(marked=True)
    assert incoming.feed(b"Welcome to node1\n") == [] and incoming.feed(MARK[:3]) == []
    assert incoming.feed(MARK[3:] + BYTES) == MESSAGES
    assert incoming.noise == b"Welcome to node1\n"


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<II", 1 << 30, 2),
        struct.pack("<II", 4, 9) + b"null",
        struct.pack("<II", 4, 4) + b"null",
        struct.pack("<II", 2, 2) + b"\xff\xfe",
        struct.pack("<II", 5000, 5000) + b"[" * 5000,
    ],
)
def test_damage(data: bytes):
    with pytest.raises(LaunchError, match="what it says is damaged"):
        Incoming().feed(data)


def test_a_shell_that_never_ends():
    with pytest.raises(LaunchError, match="it says something else than weft's agent does"):
        Incoming(marked=True).feed(b"x" * 100_000)


def test_nobody_is_held_up():
    reading, writing = os.pipe()
    out = Outgoing(writing)
    out.say({"kind": "output"}, b"x" * (1 << 20))
    assert out.kept
    taken = b""
    while out.kept:
        taken += os.read(reading, 1 << 16)
        out.push()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        out.say({"kind": "ping"})
    os.close(writing)
