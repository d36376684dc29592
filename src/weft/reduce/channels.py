"""Several collectives side by side over the same ranks, so that the wire is busy while the processors are, too.

A sum in two levels is reduced inside the host, then on the wire, then gathered inside the host; a compression works
before and after each message. On one channel these steps come one after the other:

    one channel    inside  wire----  inside  inside  wire----  inside  inside  wire----  inside

Here large tensors are cut into pieces, pieces take channels in turns, and each channel has a thread, groups and
shared memory of its own:

    channel 0      inside  wire----  inside          inside  wire----  inside
    channel 1              inside  .wire----  inside         inside  .wire----  inside
    channel 2                      inside  ..wire----  inside

A channel does its pieces in the order of the calls, and which channel a piece takes follows from the calls alone. So
the ranks meet in each channel as they do in one collective, and no channel ever waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.reduce.bucket import bounds
from weft.reduce.collective import Collective, Work

PIECE_BYTES = 2 << 20
COMPRESSED_BYTES = 8 << 20
"""Of pieces that are compressed: what a piece costs besides its values weighs more where few bytes go."""


class AllWorks:
    """Works that are one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done; raise what the first that failed raised."""
        for work in self._works:
            work.wait()


class Channels:
    """A collective over several alike ones, which belong to it; see the module. ``group``: all ranks."""

    def __init__(self, group: dist.ProcessGroup, channels: Sequence[Collective]) -> None:
        self.group = group
        self.channels = tuple(channels)
        self._next = 0

    @property
    def size(self) -> int:
        return self.channels[0].size

    def all_reduce(self, flat: torch.Tensor) -> Work:
        """Start to replace ``flat`` by its sum over the ranks; see ``Collective``."""
        works = []
        for piece in cut(flat, PIECE_BYTES):
            works.append(self.channels[self._next].all_reduce(piece))
            self._next = (self._next + 1) % len(self.channels)
        return works[0] if len(works) == 1 else AllWorks(works)

    def close(self) -> None:
        """Close each channel; nothing is in flight."""
        for each in self.channels:
            each.close()


def cut(flat: torch.Tensor, most_bytes: int) -> list[torch.Tensor]:
    """Equal pieces of ``most_bytes`` at most, as views of ``flat`` (1-D).

    >>> [piece.nbytes for piece in cut(torch.zeros(3 << 20, dtype=torch.int8), 2 << 20)]
    [1572864, 1572864]
    """
    count = max(1, -(-flat.nbytes // most_bytes))
    return [flat[start:stop] for start, stop in bounds(flat.numel(), count)]


def channels_of(collective: Collective) -> tuple[Collective, ...]:
    """The channels of a collective; itself if it has none."""
    return collective.channels if isinstance(collective, Channels) else (collective,)
