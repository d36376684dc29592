"""Memory through which CPU ranks of one host hand each other payloads: a ring for each direction of each pair.

The sender copies a payload into its ring and says in the message's header where it stands; the receiver copies it out
when the header comes, and a counter says up to where it has read. So headers keep the order, and whoever waits,
waits for a header, which comes through a pipe: nobody watches the memory. Where a ring has no room, the payload goes
another way, and no send ever waits for its receiver.

    ring      |....cccddddd..........|      given and read count bytes since the start, gaps at the end included
                   ^read    ^given

A rank owns the rings that it writes, one behind the other in one segment (see ``segment``), and the counters of what it
has read from others.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from weft.errors import TransportError
from weft.transport import segment
from weft.transport.pipes import Pipe
from weft.transport.segment import LINE, Segment

RING_BYTES = 16 << 20
MOST_RANKS = 32
_PIECE = 64


class Rings:
    """The rings of one rank. ``segments``: its own, and those of the ranks with which it shares memory; ``pipes`` to
    the same ranks."""

    def __init__(self, rank: int, segments: dict[int, Segment], pipes: dict[int, Pipe] | None = None) -> None:
        self._rank = rank
        self.pipes = pipes or {}
        self._segments = segments
        self._given = dict.fromkeys(segments, 0)
        self._begun = dict.fromkeys(segments, 0)
        self._out, self._in = {}, {}
        for peer, found in segments.items():
            self._out[peer] = segments[rank].view(torch.uint8, peer * RING_BYTES, RING_BYTES)
            self._in[peer] = found.view(torch.uint8, rank * RING_BYTES, RING_BYTES)

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> Rings | None:
        """Rings to all ranks of a group that can share memory; None if there are none. Every rank calls it."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        able = segment.available() and size <= MOST_RANKS
        own, address = Segment.create(size * RING_BYTES) if able else (None, (-1, -1, 0, 0))
        pipes = {peer: Pipe() for peer in range(size) if own is not None and peer != rank}
        numbers = [pipes[peer].number if peer in pipes else -1 for peer in range(size)]
        opened: dict[int, Segment] = {}
        rows = _gather([segment.host_number(), *address, *numbers], group)
        for peer, (host, *there) in enumerate(rows):
            if peer in pipes and there[0] >= 0 and host == rows[rank][0]:
                with contextlib.suppress(TransportError):
                    found = Segment.open(tuple(there[:4]), size * RING_BYTES)  # type: ignore[arg-type]
                    opened[peer] = found
                    pipes[peer].connect(there[0], there[4 + rank])
        reached = [peer for peer in opened if pipes[peer].writes]
        mapped = _gather([int(peer in reached) for peer in range(size)], group)
        kept = {peer for peer in reached if mapped[peer][rank]}
        for peer in kept:
            pipes[peer].release_lent()
        for peer in pipes.keys() - kept:
            pipes[peer].close()
        for peer in opened.keys() - kept:
            opened[peer].close()
        if own is None or not kept:
            if own is not None:
                own.close()
            return None
        return cls(rank, {rank: own, **{peer: opened[peer] for peer in kept}}, {p: pipes[p] for p in kept})

    def put(self, peer: int, payload: torch.Tensor) -> tuple[int, int] | None:
        """Copy a payload (uint8 [size]) into the ring to ``peer``: where it begins, and what is given with it.

        None if the peer shares no memory, the payload is larger than the ring, or the peer has yet to read too much.
        """
        size = payload.numel()
        if peer not in self._out or size > RING_BYTES:
            return None
        given = begin = self._given[peer]
        read = self._segments[peer].counters[LINE * self._rank]
        if read == given or begin % RING_BYTES + size > RING_BYTES:
            # An empty ring starts again, so few pages are touched; a piece is whole.
            begin += -begin % RING_BYTES
        end = begin + -(-size // _PIECE) * _PIECE
        begun = begin if read == given else self._begun[peer]
        if end - max(read, begun) > RING_BYTES:
            return None
        self._begun[peer] = begun
        at = begin % RING_BYTES
        self._out[peer][at : at + size].copy_(payload)
        self._given[peer] = end
        return at, end

    def take(self, peer: int, at: int, end: int, size: int) -> torch.Tensor:
        """The bytes that ``peer`` has put there, uint8 [size]; their room is free then."""
        payload = self._in[peer][at : at + size].clone()
        self._segments[self._rank].counters[LINE * peer] = end
        return payload

    def given(self, peer: int) -> int:
        """The number of bytes of the ring to ``peer`` that have been used since the start."""
        return self._given[peer]

    def close(self) -> None:
        """Give the memory back."""
        self._out.clear()
        self._in.clear()
        for pipe in self.pipes.values():
            pipe.close()
        for each in self._segments.values():
            each.close()


def _gather(words: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The words of every rank, in the order of the ranks."""
    rows = [torch.empty(len(words), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor(words), group=group)
    return [row.tolist() for row in rows]
