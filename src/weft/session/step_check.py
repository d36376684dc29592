"""Ranks of a pipeline tell each other at the beginning of a step what they were called with.

They look at it when they have nothing else to do, so that it costs no time, and before they could wait for ever.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from weft.errors import DivergenceError
from weft.launch.startup import first_difference
from weft.transport.channel import BEGIN, Channel, Key, Message

ADVICE = (
    ". The ranks of one pipeline must read the same batches: seed, shuffle and shard the data by weft.dp_rank(), not "
    "by weft.rank()"
)


@dataclass
class StepCheck:
    """What the peers said that they were called with in this step, and what the first one told, which all use.

    Attributes:
        channel: Between the ranks of the pipeline.
        ranks: Those ranks, by their number in the job.
        me: Which of them this one is.
        step: The number of the step.
        call: What this rank was called with, as JSON.
        timeout_s: How long this rank waits for the first one.
        waiting: The peers that have not told yet.
    """

    channel: Channel
    ranks: tuple[int, ...]
    me: int
    step: int
    call: str
    timeout_s: float
    waiting: list[int] = field(default_factory=list)

    def begin(self, own: Any) -> Any:
        """What the pipeline's first rank gave for ``own`` (JSON). The peers are told what this rank was called with.

        The others wait for the first rank: they could not run before it has begun anyway.
        """
        self.waiting = [peer for peer in range(len(self.ranks)) if peer != self.me]
        text = json.dumps([own, self.call])
        for peer in self.waiting:
            self.channel.send(peer, Message(self.key, text=text))
        if self.me == 0:
            return own
        return self._receive(0)

    def wait_for_all(self) -> None:
        """Wait until every peer has told, and compare.

        Raises:
            DivergenceError: A peer was called with something else.
        """
        while self.waiting:
            self._receive(self.waiting[0])

    def _receive(self, peer: int) -> Any:
        message = self.channel.mailbox.receive(
            peer, self.key, self.timeout_s,
            f"rank {self.ranks[self.me]} began step {self.step}, but rank {self.ranks[peer]} did not for "
            f"{self.timeout_s:g} s: does it call the step less often, or wait in a collective of its own?",
        )  # fmt: skip
        self.waiting.remove(peer)
        theirs, call = json.loads(message.text or "")
        self._compare(peer, call)
        return theirs

    @property
    def key(self) -> Key:
        """The key of the messages that tell of this step."""
        return Key(BEGIN, self.step, 0, 0)

    def look(self) -> None:
        """Compare with what has arrived.

        Raises:
            DivergenceError: A peer was called with something else; the text names the first difference.
        """
        for peer in list(self.waiting):
            message = self.channel.mailbox.take(peer, self.key)
            if message is not None:
                self.waiting.remove(peer)
                self._compare(peer, json.loads(message.text or "")[1])

    def _compare(self, peer: int, call: str) -> None:
        if call == self.call:
            return
        mine, other = self.ranks[self.me], self.ranks[peer]
        pair = dict(sorted({mine: {"input": self.call}, other: {"input": call}}.items()))
        difference = first_difference(pair).partition(": ")[2]
        raise DivergenceError(f"in step {self.step} the ranks were called differently: {difference}{ADVICE}")
