"""Messages between the launcher and the agent on a host: a few named values, and bytes. Pure but for the descriptors.

    length of both, length of the values, values as JSON, bytes

The first thing that an agent says is a mark, so that it is not confused with what a shell says while it starts.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from weft.errors import LaunchError
from weft.untrusted import translated

MARK = b"\n\0weft-agent-1\0\n"
SILENT_S = 30.0
"""Who says nothing for so long counts as gone, on both sides, until the launcher has sent its own limit."""
PING_S = 1.0
"""Who has nothing to say says so after this time."""
_LENGTHS = struct.Struct("<II")
_LONGEST = 16 << 20
_NOISE = 1 << 16
Message = tuple[dict[str, Any], bytes]


def packed(values: dict[str, Any], data: bytes = b"") -> bytes:
    """A message as bytes.

    >>> Incoming().feed(packed({"kind": "output", "rank": 3}, b"text"))
    [({'kind': 'output', 'rank': 3}, b'text')]
    """
    head = json.dumps(values).encode()
    return _LENGTHS.pack(len(head) + len(data), len(head)) + head + data


class Incoming:
    """Puts messages together out of the bytes that arrive.

    Args:
        marked: They begin after the agent's mark; ``noise`` is what came before it.
    """

    def __init__(self, marked: bool = False) -> None:
        self.noise = b""
        self._marked = marked
        self._kept = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now.

        Raises:
            LaunchError: These are no messages.
        """
        self._kept += data
        if self._marked:
            before, mark, after = bytes(self._kept).partition(MARK)
            if not mark:
                if len(before) > _NOISE:
                    raise LaunchError("it says something else than weft's agent does")
                return []
            self.noise, self._kept, self._marked = before, bytearray(after), False
        return [*self._whole()]

    def rest(self) -> bytes:
        """The bytes that are no message yet."""
        return bytes(self._kept)

    def _whole(self) -> Iterator[Message]:
        while len(self._kept) >= _LENGTHS.size:
            length, head = _LENGTHS.unpack_from(self._kept)
            if length > _LONGEST or head > length:
                raise LaunchError("what it says is damaged")
            end = _LENGTHS.size + length
            if len(self._kept) < end:
                return
            body = bytes(self._kept[_LENGTHS.size : end])
            del self._kept[:end]
            with translated("what it says is damaged", LaunchError):
                values = json.loads(body[:head])
                if not isinstance(values, dict):
                    raise ValueError("a message without names")
            yield values, body[head:]


class Outgoing:
    """Messages still to be sent; whoever adds one is never held up."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.kept = bytearray()

    def say(self, values: dict[str, Any], data: bytes = b"") -> None:
        """Said as soon as the other side listens."""
        self.kept += packed(values, data)
        self.push()

    def push(self) -> None:
        """Hands on as much as is taken now.

        Raises:
            BrokenPipeError: Nobody listens any more.
        """
        while self.kept:
            try:
                del self.kept[: os.write(self.descriptor, self.kept[: 1 << 16])]
            except BlockingIOError:
                return
