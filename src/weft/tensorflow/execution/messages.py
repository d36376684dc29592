"""A step's messages on one rank, and what it tells of itself: called from Python, and from inside of a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import PeerError
from weft.session.session import wait_timeout_s
from weft.tensorflow.session.session import Session
from weft.tensorflow.session.wire import from_torch, to_torch
from weft.transport.channel import VALUE, Key, Message


@dataclass(frozen=True)
class Item:
    """A value that goes from one partition to another. ``number``: its message's; ``peer``: the other partition."""

    number: int
    peer: int
    name: str


class Messages:
    """What a step of this rank sends, receives and records.

    Whatever fails here has been told to the other ranks when the error is raised. Inside of a graph it becomes one of
    TensorFlow's own errors.
    """

    def __init__(self, session: Session, microbatches: int, samples: int | None = None) -> None:
        self.session = session
        self.samples = samples
        self.microbatches = microbatches
        self._began_s = 0.0
        self._at_s = 0.0

    def begin(self, evaluates: bool) -> None:
        """A step begins."""
        session = self.session
        session.check_whole()
        session.count_step(evaluates)
        session.monitor.note("forward", session.steps, 0)
        self._began_s = time.perf_counter()

    def end(self) -> None:
        """A step has ended."""
        session = self.session
        if session.channel is not None:
            session.channel.mailbox.discard(session.steps)
        if session.recorder is not None:
            session.recorder.add("step", session.steps, -1, self._began_s, time.perf_counter())
        session.monitor.note("", session.steps)

    def receive(self, microbatch: int, items: Sequence[Item]) -> list[Any]:
        """The values of other partitions, when they are there."""
        return self._guarded(lambda: [self._receive(microbatch, item) for item in items])

    def _receive(self, microbatch: int, item: Item) -> Any:
        session = self.session
        assert session.channel is not None
        key = Key(VALUE, session.steps, microbatch, item.number)
        message = session.channel.mailbox.take(item.peer, key)
        if message is None:
            peer = session.peers("pp")[item.peer]
            session.monitor.note("wait", session.steps, microbatch, None, peer)
            began = time.perf_counter()
            timeout_s = wait_timeout_s(session.settings)
            message = session.channel.mailbox.receive(
                item.peer, key, timeout_s,
                f"nothing arrived for {timeout_s:g} s on rank {session.rank}, which waits for {item.name} of "
                f"microbatch {microbatch} from rank {peer}. If a rank may take this long between two steps, raise "
                '"wait_timeout" (seconds).',
            )  # fmt: skip
            if session.recorder is not None:
                session.recorder.add("wait", session.steps, microbatch, began, time.perf_counter(), peer)
        return from_torch(message.payload)

    def send(self, microbatch: int, items: Sequence[Item], tensors: Sequence[Any]) -> None:
        """Hand values over for other partitions."""

        def run() -> None:
            assert self.session.channel is not None
            for item, tensor in zip(items, tensors, strict=True):
                key = Key(VALUE, self.session.steps, microbatch, item.number)
                self.session.channel.send(item.peer, Message(key, to_torch(tensor)))

        self._guarded(run)

    def start(self, phase: str, microbatch: int) -> None:
        """A phase begins to compute."""
        self.session.monitor.note(phase, self.session.steps, microbatch)
        self._at_s = time.perf_counter()

    def done(self, kind: str, microbatch: int, stage: int) -> None:
        """A phase has computed."""
        recorder = self.session.recorder
        if recorder is not None:
            recorder.add(kind, self.session.steps, microbatch, self._at_s, time.perf_counter(), stage=stage)

    def _guarded(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except BaseException as error:
            session = self.session
            session.failure = session.failure or error
            session.break_off(error)
            if session.channel is not None and not isinstance(error, PeerError):
                session.channel.abort(session.broken)
            raise
