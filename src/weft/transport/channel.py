"""The port through which ranks talk: addressed messages in, a mailbox out.

A message has a key on which sender and receiver agree beforehand, because both run the same
program: nobody asks, nobody answers. Within one key, messages from one peer keep their order.
Nothing here knows a framework's tensors: a payload is whatever the adapter moves.

    adapter        thread that receives           executor
    torch_dist  -> Mailbox.put(peer, message)  -> Mailbox.take(peer, key)
    loopback    -> (the sender's own thread)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from weft.errors import StallError


class Key(NamedTuple):
    """The key of a message: ``kind`` (one of the constants below), step, microbatch, number in the program.

    From the bit `VERSION_BIT` on, a value's number says how often that had been written by then; from `PASS_BIT` on, a
    gradient's says which backward pass of the microbatch it belongs to.
    """

    kind: int
    step: int
    microbatch: int
    number: int

    def __str__(self) -> str:
        number = self.number % (1 << VERSION_BIT)
        return f"{KINDS[self.kind]} {number} of microbatch {self.microbatch} in step {self.step}"


VERSION_BIT, PASS_BIT = 32, 52
VALUE, GRADIENT, SPEC, SHAPES, READ, OUTPUT, BEGIN, ABORT, STATISTICS, WHERE, TURN = range(11)
KINDS = (
    "value",
    "gradient",
    "signature",
    "shapes",
    "read value",
    "output",
    "begin",
    "abort",
    "statistics",
    "where",
    "turn",
)


ALIGNMENT = 64
"""Payloads that have arrived begin at a multiple of so many bytes, whatever carried them: a library may rely on it that
takes them over without a copy."""
HEADERS, AHEAD, ASKED, BORROWED, OBJECTS = range(0x0B7EC0, 0x0B7EC5)
"""The tags of what weft sends over groups of ranks: two uses of one tag would take each other's messages. Scripts get
these groups too (``get_pp_process_group``) and send with tags of their own, mostly 0: none here is small.

``AHEAD``: payloads whose receive is posted before they are sent; ``ASKED``: those that the receiver asks for after
it has read their header; ``BORROWED``: parameters for a comparison with one process; ``OBJECTS``: those of ``send``."""


@dataclass(frozen=True)
class Message:
    """A payload (or none), a text (or none) and a flag whose meaning the kind gives.

    A payload is whatever the adapter moves. One that has arrived has memory of its own, aligned to :data:`ALIGNMENT`
    bytes: neither the sender, nor the channel, nor another message writes there. Only the loopback channel, which tests
    use, hands over the very object that was sent.
    """

    key: Key
    payload: Any = None
    text: str | None = None
    flag: bool = False


class Channel(Protocol):
    """Sends never block the caller; what arrives stands in ``mailbox``.

    ``stream``: where what arrives will be used, on a GPU. ``record(kind, peer, key, start_s, end_s)`` gets every
    message that has left ("send") or arrived ("recv"), if one is set. ``moment`` says when it is; on a GPU, when the
    work behind a message will be done.
    """

    mailbox: Mailbox
    stream: Any
    record: Callable[[str, int, Key, Any, float], None] | None
    moment: Callable[[], Any]

    def send(self, peer: int, message: Message) -> None:
        """Queue ``message`` for ``peer`` (a position in the pipeline's group) and return at once."""

    def flush(self) -> None:
        """Return when everything sent so far has left this rank."""

    def abort(self, text: str) -> None:
        """Send every peer that this rank failed, and why; their waits end with it."""

    def join(self, timeout_s: float = 5.0) -> None:
        """Wait for the threads to end, after every rank called :meth:`close`."""

    def close(self) -> None:
        """End the threads of this channel; nothing may be sent afterwards."""


class Mailbox:
    """Messages that arrived and were not taken yet, by peer and key.

    ``arrivals`` counts them, so that a waiting executor sleeps until the count moves.
    ``fail`` ends every present and future wait with the first cause.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[int, Key], deque[Message]] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.arrivals = 0

    def put(self, peer: int, message: Message) -> None:
        with self._changed:
            self._messages.setdefault((peer, message.key), deque()).append(message)
            self.arrivals += 1
            self._changed.notify_all()

    def fail(self, cause: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or cause
            self.arrivals += 1
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def has(self, peer: int, key: Key) -> bool:
        return (peer, key) in self._messages

    def take(self, peer: int, key: Key) -> Message | None:
        """The oldest message of this key, or ``None`` when there is none yet. A SPEC stays for others to read."""
        with self._changed:
            queue = self._messages.get((peer, key))
            if queue is None:
                return None
            if key.kind == SPEC:
                return queue[-1]
            message = queue.popleft()
            if not queue:
                del self._messages[(peer, key)]
            return message

    def receive(self, peer: int, key: Key, timeout_s: float, what: str) -> Message:
        """The oldest message of this key, when it is there; the thread sleeps until then.

        Raises:
            StallError: It is not there after `timeout_s`; `what` is the text.
            BaseException: The cause with which :meth:`fail` ends all waits.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            seen = self.arrivals
            message = self.take(peer, key)
            if message is not None:
                return message
            if self._failure is not None:
                raise self._failure
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StallError(what)
            self.wait(seen, left_s)

    def wait(self, seen: int, timeout_s: float) -> int:
        """Sleep until more than ``seen`` messages have arrived, at most ``timeout_s``; the count."""
        with self._changed:
            self._changed.wait_for(lambda: self.arrivals > seen, timeout_s)
            return self.arrivals

    def discard(self, before_step: int, before_generation: int = 0) -> int:
        """Drop what earlier steps left untaken (outputs nobody read, say), and signatures of earlier generations, which
        have these in the place of the step; how many."""
        with self._changed:
            stale = [
                at
                for at in self._messages
                if at[1].step < (before_generation if at[1].kind == SPEC else before_step)
            ]
            for at in stale:
                del self._messages[at]
            return len(stale)
