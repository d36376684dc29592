"""Ranks that hold parts of the same weights run their microbatches in one order: that of the first of them.

Inside of a unit these ranks add up what each has computed, in plain collectives, which match by their order alone.
Which microbatch has the turn depends on when messages arrive, so each rank would choose for itself. Here one chooses as
ever, and tells the others; these take the same turns, as soon as they can. Nobody waits for ever: what the first rank
could run the others can run too, when their own messages have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.transport.channel import TURN, Channel, Key, Message


class Turn(NamedTuple):
    """What has the turn: a microbatch (its stage is -1), or weight gradients of a microbatch in a stage."""

    microbatch: int
    stage: int = -1


class Turns:
    """The turns of one step after the other, of ranks that take the same ones.

    Args:
        channel: Between these ranks.
        peers: The other ones, by their positions in the channel's group.
        leads: Whether this rank is the first of them, which chooses.
        first: The first one, as the channel's mailbox names it.
    """

    def __init__(self, channel: Channel, peers: Sequence[int], leads: bool, first: int) -> None:
        self.leads = leads
        self._channel, self._peers, self._first = channel, peers, first
        self._key = Key(TURN, 0, 0, 0)
        self._next: Turn | None = None

    def begin(self, step: int) -> None:
        """A step begins; all ranks give it the same number."""
        self._key, self._next = Key(TURN, step, 0, 0), None

    def tell(self, turn: Turn) -> None:
        """The first rank has given the turn away."""
        for peer in self._peers:
            self._channel.send(peer, Message(self._key, text=f"{turn.microbatch} {turn.stage}"))

    def told(self) -> Turn | None:
        """The turn that comes next on a rank that follows; None as long as it is not known."""
        if self._next is None:
            message = self._channel.mailbox.take(self._first, self._key)
            if message is not None:
                microbatch, stage = map(int, (message.text or "").split())
                self._next = Turn(microbatch, stage)
        return self._next

    def taken(self) -> None:
        """The turn that was told goes on here, too."""
        self._next = None
