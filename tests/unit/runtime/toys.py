"""Ranks without a framework: an executor on a loopback channel, and programs that pass numbers on."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.runtime.executor import NO_CHECKS, Checks, Executor
from weft.runtime.microbatch import Microbatch
from weft.schedule.order import Order
from weft.transport.channel import GRADIENT, VALUE, Key, Message
from weft.transport.loopback import LoopbackChannel, connect

Body = Callable[[Microbatch], Any]


@dataclass
class Rank:
    """One rank, and what it did: `F0`, `B0` and so on, and how many microbatches it held at most."""

    number: int
    size: int
    channel: LoopbackChannel
    executor: Executor
    did: list[str] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    peak: int = 0
    dice: random.Random = field(default_factory=random.Random)
    slowest_s: float = 0.0

    @classmethod
    def make(cls, size: int, wait_timeout_s: float = 20.0) -> list[Rank]:
        return [
            cls(channel.rank, size, channel, Executor(channel.mailbox, channel.rank, wait_timeout_s))
            for channel in connect(size)
        ]

    def run(self, bodies: Sequence[Body], order: Order, checks: Checks = NO_CHECKS) -> list[Any]:
        return self.executor.run([self._counted(body) for body in bodies], order, checks)

    def work(self, microbatch: Microbatch) -> None:
        """Some of this rank's own work in the present phase."""
        did = f"{microbatch.phase}{microbatch.index}"
        if did not in self.did[-1:]:
            self.did.append(did)
        if self.slowest_s:
            time.sleep(self.dice.random() * self.slowest_s)

    def _counted(self, body: Body) -> Body:
        def counted(microbatch: Microbatch) -> Any:
            self.held.add(microbatch.index)
            self.peak = max(self.peak, len(self.held))
            try:
                return body(microbatch)
            finally:
                self.held.discard(microbatch.index)

        return counted


def one_rank(number: int, size: int) -> Rank:
    return Rank.make(size)[number]


def put_all(rank: Rank, microbatches: int) -> None:
    """Everything that the neighbours of a rank will ever send to it in `chain`."""
    for index in range(microbatches):
        for kind, peer in ((VALUE, rank.number - 1), (GRADIENT, rank.number + 1)):
            if 0 <= peer < rank.size:
                rank.channel.mailbox.put(peer, Message(Key(kind, 0, index, 0), payload=1))


def chain(rank: Rank) -> Body:
    """Forward from the first rank to the last, backward from the last to the first; each rank adds one."""

    def body(microbatch: Microbatch) -> int:
        def key(kind: int) -> Key:
            return Key(kind, 0, microbatch.index, 0)

        value = microbatch.receive(rank.number - 1, key(VALUE)).payload if rank.number else 0
        rank.work(microbatch)
        if rank.number < rank.size - 1:
            rank.channel.send(rank.number + 1, Message(key(VALUE), payload=value + 1))
        microbatch.begin("B")
        grad = (
            microbatch.receive(rank.number + 1, key(GRADIENT)).payload
            if rank.number < rank.size - 1
            else value
        )
        rank.work(microbatch)
        if rank.number:
            rank.channel.send(rank.number - 1, Message(key(GRADIENT), payload=grad + 1))
        return grad

    return body


def tour(rank: Rank, visits: Sequence[int]) -> Body:
    """A program that visits ranks in any order, as often as it likes, and goes back the same way."""

    def body(microbatch: Microbatch) -> int | None:
        last = len(visits) - 1
        value: int | None = 0 if visits[0] == rank.number else None
        for number, here in enumerate(visits):
            if here != rank.number:
                continue
            if number and visits[number - 1] != here:
                key = Key(VALUE, 0, microbatch.index, number)
                value = microbatch.receive(visits[number - 1], key).payload
            rank.work(microbatch)
            assert value is not None
            value += 1
            if number < last and visits[number + 1] != here:
                key = Key(VALUE, 0, microbatch.index, number + 1)
                rank.channel.send(visits[number + 1], Message(key, payload=value))
        microbatch.begin("B")
        for number in range(last, -1, -1):
            if visits[number] != rank.number:
                continue
            if number < last and visits[number + 1] != rank.number:
                key = Key(GRADIENT, 0, microbatch.index, number)
                value = microbatch.receive(visits[number + 1], key).payload
            rank.work(microbatch)
            assert value is not None
            value += 1
            if number and visits[number - 1] != rank.number:
                key = Key(GRADIENT, 0, microbatch.index, number - 1)
                rank.channel.send(visits[number - 1], Message(key, payload=value))
        return value

    return body


def run_all(
    ranks: Sequence[Rank], bodies: Callable[[Rank, int], Body], orders: Sequence[Order], count: int
) -> list[Any]:
    """Every rank on a thread of its own; their results, or the first rank's error."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: Rank) -> None:
        try:
            made = [bodies(rank, index) for index in range(count)]
            results[rank.number] = rank.run(made, orders[rank.number])
        except BaseException as error:
            results[rank.number] = error
            rank.channel.abort(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    for rank in ranks:
        rank.executor.close()
    return results
