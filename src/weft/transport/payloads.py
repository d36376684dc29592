"""The payloads of one peer as they are received: into memory that is posted ahead where their size is foreseen.

A payload whose receive is posted flows while both ranks compute; any other waits until the receiver has seen its
header and has asked for it, which takes the threads of two busy ranks. So a receiver keeps one receive posted, for
payloads up to the largest that came so far. The sender counts as the receiver does, and so knows where each goes:

    sizes            4   4   9   2   9
    posted then      0   4   4   4   9
    goes there       no  yes no  yes yes
"""

from __future__ import annotations

from typing import Any

import torch

from weft.transport.channel import AHEAD, ASKED

POSTED_BYTES = 4 << 20
"""Larger payloads always come after their header: asking for them is a small part of their time."""


class Posted:
    """The receive that one rank has posted for payloads of another, as both of them count it.

    >>> posted = Posted()
    >>> [(posted.bytes, posted.takes(size)) for size in (4, 4, 9, 2, 9)]
    [(0, False), (4, True), (4, False), (4, True), (9, True)]
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0

    def takes(self, size: int) -> bool:
        """True if the next payload, of `size` bytes, goes there; `bytes` is what is posted after it."""
        if size > POSTED_BYTES:
            return False
        fits = size <= self.bytes
        self._largest = max(self._largest, size)
        if fits or not self.bytes:
            self.bytes = self._largest
        return fits


class Payloads:
    """The payloads of one peer, in the order of their headers."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._posted = Posted()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._work: Any = None

    def next(self, size: int) -> torch.Tensor:
        """The next payload, uint8 [size]."""
        if self._posted.takes(size):
            self._work.wait()
            # A small part of a large buffer is copied, so that it does not keep all of it.
            found = self._buffer[:size].clone() if 2 * size < len(self._buffer) else self._buffer[:size]
            self._work = None
        else:
            found = torch.empty(size, dtype=torch.uint8)
            self._group.recv([found], self._peer, ASKED).wait()
        if self._work is None and self._posted.bytes:
            self._buffer = torch.empty(self._posted.bytes, dtype=torch.uint8)
            self._work = self._group.recv([self._buffer], self._peer, AHEAD)
        return found
