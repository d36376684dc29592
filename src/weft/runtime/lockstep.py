"""Ranks that hold parts of the same weights run their microbatches in one order: that of the first of them.

Inside of a unit these ranks all-reduce what each has computed, or gather its weights. Collectives match by their
order alone. Which microbatch has the turn depends on when messages arrive, so each rank would choose for itself. Here
one rank chooses as ever, and sends its choice to the others. These take the same turns, as soon as they can. Nobody
waits for ever: what the first rank could run the others can run too, when their own messages have come.

Ranks with the same samples make the same collectives, and their microbatches wait for the same messages: with each turn
the first one sends what its microbatch has waited for, and a rank whose own waits for something else says so at once.
Ranks with other samples may wait for others. There the first one also announces each collective: a rank that is
about to make another one says so, instead of waiting for ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import DivergenceError, StallError
from weft.transport.channel import TURN, Channel, Key, Message

MARK = "= "
"""Before what the first rank does, where it does not give the turn away."""
POLL_S = 1.0


class Turn(NamedTuple):
    """The task that runs: a microbatch (its stage is -1), or weight gradients of a microbatch in a stage.

    ``waited``: the message that the microbatch has waited for on the first rank; empty where that is not compared.
    """

    microbatch: int
    stage: int = -1
    waited: str = ""


class LockstepOrder:
    """The turns of one step after the other, of ranks that take the same ones.

    Args:
        channel: Between these ranks.
        peers: The other ones, by their positions in the channel's group.
        leads: Whether this rank is the first of them, which chooses.
        first: The first one, as the channel's mailbox names it.
        wait_timeout_s: How long a rank that follows waits for what the first one does.
        same_samples: Whether all of them have the same samples, so that they wait for the same messages.
    """

    def __init__(
        self, channel: Channel, peers: Sequence[int], leads: bool, first: int, wait_timeout_s: float = 600.0,
        same_samples: bool = False,
    ) -> None:  # fmt: skip
        self.leads, self.same_samples = leads, same_samples
        self._channel, self._peers, self._first = channel, peers, first
        self._wait_timeout_s = wait_timeout_s
        self._key = Key(TURN, 0, 0, 0)
        self._received: str | None = None

    def begin(self, step: int) -> None:
        """A step begins; all ranks give it the same number."""
        self._key, self._received = Key(TURN, step, 0, 0), None

    def announce(self, turn: Turn) -> None:
        """The first rank has given the turn away."""
        self._send(f"{turn.microbatch} {turn.stage} {turn.waited}")

    def next_turn(self) -> Turn | None:
        """The turn that comes next on a rank that follows; None as long as it is not known.

        Raises:
            DivergenceError: The first rank goes on without giving the turn away.
        """
        text = self._look()
        if text is None:
            return None
        if text.startswith(MARK):
            raise DivergenceError(differing(text.removeprefix(MARK), "is done with its turn"))
        microbatch, stage, waited = text.split(" ", 2)
        return Turn(int(microbatch), int(stage), waited)

    def taken(self) -> None:
        """The turn that was received goes on here, too."""
        self._received = None

    def agree(self, what: str) -> None:
        """All these ranks do ``what`` next, the first one and those that follow.

        Raises:
            DivergenceError: The first rank does something else.
            StallError: Nobody knows what it does.
        """
        if self.leads:
            self._send(MARK + what)
            return
        text = self._await()
        if text != MARK + what:
            first = text.removeprefix(MARK) if text.startswith(MARK) else "is done with its turn"
            raise DivergenceError(differing(first, what))
        self._received = None

    def end(self) -> None:
        """All microbatches have run."""
        self.agree("is done with the step")

    def _send(self, text: str) -> None:
        for peer in self._peers:
            self._channel.send(peer, Message(self._key, text=text))

    def _look(self) -> str | None:
        """The next message of the first rank, if it has come."""
        if self._received is None:
            message = self._channel.mailbox.take(self._first, self._key)
            self._received = None if message is None else message.text or ""
        return self._received

    def _await(self) -> str:
        mailbox, began = self._channel.mailbox, time.perf_counter()
        while True:
            seen = mailbox.arrivals
            text = self._look()
            if text is not None:
                return text
            if mailbox.failure is not None:
                raise mailbox.failure
            if time.perf_counter() - began > self._wait_timeout_s:
                raise StallError(
                    f"the first of the ranks that take the same turns has sent nothing for {self._wait_timeout_s:g} s. "
                    'If a rank may take this long, raise "wait_timeout" (seconds).'
                )
            mailbox.wait(seen, POLL_S)


def differing(first: str, own: str) -> str:
    """The error text where ranks that must do the same in one order do not."""
    return (
        "ranks that hold parts of the same weights run different programs: in the same place the first of them "
        f"{first}, and this one {own}. All of them call the same modules, and look at the same tensors, in the same "
        "order, in as many microbatches: what one rank does alone, print say, belongs behind the step. Where samples "
        'decide, write "sharded_parameters_gathered": "step", or "expert_parallel_degree": 1'
    )
