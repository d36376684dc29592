"""Channels between "ranks" of one process: the fake for tests.

``connect(2)`` returns one channel a rank. Messages arrive in order, at once, or when ``hold`` is
lifted, so that a test can choose who is late.
"""

from __future__ import annotations

from weft.errors import PeerError, TransportError
from weft.transport.channel import Mailbox, Message


class LoopbackChannel:
    """One end of an in-process network; see :func:`connect`."""

    def __init__(self, rank: int, network: list[LoopbackChannel]):
        self.rank = rank
        self.mailbox = Mailbox()
        self.held: list[tuple[int, Message]] | None = None
        self._network = network
        self._closed = False

    def send(self, peer: int, message: Message) -> None:
        if self._closed:
            raise TransportError(f"rank {self.rank} sent {message.key} after its channel was closed")
        if self.held is not None:
            self.held.append((peer, message))
        else:
            self._network[peer].mailbox.put(self.rank, message)

    def hold(self) -> None:
        """Keep back what is sent from now on, until :meth:`release`."""
        self.held = []

    def release(self) -> None:
        held, self.held = self.held or [], None
        for peer, message in held:
            self.send(peer, message)

    def flush(self) -> None:
        pass

    def abort(self, text: str) -> None:
        for peer in self._network:
            if peer is not self:
                peer.mailbox.fail(PeerError(self.rank, text))

    def join(self, timeout_s: float = 5.0) -> None:
        pass

    def close(self) -> None:
        self._closed = True


def connect(ranks: int) -> list[LoopbackChannel]:
    """One channel for each of ``ranks`` in-process ranks, all connected."""
    network: list[LoopbackChannel] = []
    network.extend(LoopbackChannel(rank, network) for rank in range(ranks))
    return network
