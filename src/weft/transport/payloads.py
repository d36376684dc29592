"""The payloads of one peer as they are received: into memory that is posted ahead where their size is foreseen."""

from __future__ import annotations

from typing import Any

import torch

from weft.transport.posted import Posted
from weft.transport.tags import AHEAD, ASKED


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
