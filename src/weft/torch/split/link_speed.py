"""The time of a message, measured between a pipeline's first two ranks as it happens in a step.

The messages go through the channel itself, and on a CPU other work keeps the processor busy meanwhile: there the
threads that move messages compete with it, and an idle machine would promise too much.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

from weft.session.session import wait_timeout_s
from weft.simulate import Links
from weft.topology.cluster import Link
from weft.torch.session.session import Session
from weft.transport.channel import VALUE, Channel, Key, Message

TRIES, SMALL_BYTES, LARGE_BYTES = 9, 1 << 10, 1 << 20
WIDTH = 192


class MeasuredLink(NamedTuple):
    """One way between two ranks: ``latency_s + bytes / bytes_per_s`` until a tensor is there, and what that costs the
    processor on each side, ``overhead_s + bytes * overhead_s_per_byte``."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    overhead_s: float = 0.0
    overhead_s_per_byte: float = 0.0

    def links(self, tensor_bytes: float) -> Links:
        """The same between all ranks; the processor's part for tensors of a typical size."""
        overhead_s = self.overhead_s + tensor_bytes * self.overhead_s_per_byte
        return Links.uniform(Link(self.latency_s, self.bytes_per_s), overhead_s=overhead_s)


def measure_link(session: Session) -> MeasuredLink:
    """Medians over messages of 1 KiB and 1 MiB, in seconds and bytes per second; what the first rank gets counts.

    All ranks of the pipeline call this, with no other message under way. Raises what the mailbox failed with, if the
    peer fails meanwhile.
    """
    if session.rehearsal is not None:
        link: MeasuredLink = session.rehearsal.link
        return link
    me = session.position("pp")
    assert session.pipeline is not None
    if me > 1:
        return MeasuredLink()
    channel, timeout_s = session.pipeline.channel, wait_timeout_s(session.settings)
    with busy(session.device.type == "cpu") as worked_s:
        found = []
        for size in (SMALL_BYTES, LARGE_BYTES):
            content = torch.zeros(size, dtype=torch.uint8, device=session.device)
            seen = [_there_and_back(channel, me, content, number, timeout_s) for number in range(TRIES)]
            found.append(median(seen))
        spent = []
        for size in (SMALL_BYTES, LARGE_BYTES):
            content = torch.zeros(size, dtype=torch.uint8, device=session.device)
            before_s = time.process_time() - worked_s()
            for number in range(TRIES):
                _there_and_back(channel, me, content, number, timeout_s)
            spent.append((time.process_time() - worked_s() - before_s) / TRIES / 2)
    larger = LARGE_BYTES - SMALL_BYTES
    return MeasuredLink(
        found[0],
        larger / max(found[1] - found[0], 1e-9),
        max(spent[0], 0.0),
        max(spent[1] - spent[0], 0.0) / larger,
    )


def _there_and_back(channel: Channel, me: int, content: torch.Tensor, number: int, timeout_s: float) -> float:
    """Half of the time that a tensor of bytes takes to the other rank and back again."""
    start_s = time.perf_counter()
    for sender in (0, 1):
        key = Key(VALUE, 0, sender, len(content) + number)
        if me == sender:
            channel.send(1 - me, Message(key, content))
        else:
            channel.mailbox.receive(1 - me, key, timeout_s, "a message that measures the link did not arrive")
    return (time.perf_counter() - start_s) / 2


def keep_others_busy(session: Session) -> AbstractContextManager[Any]:
    """Inside, the ranks that do not decide keep their processors busy.

    So the first rank measures times as they are in a step, where all ranks compute at once.
    """
    return busy(session.device.type == "cpu" and session.position("pp") > 0)


@contextmanager
def busy(wanted: bool) -> Iterator[Callable[[], float]]:
    """Inside, a thread computes as a step does, if ``wanted``; the value is its processor time so far."""
    spent, stop = [0.0], threading.Event()

    def work() -> None:
        matrix = torch.zeros(WIDTH, WIDTH)
        while not stop.is_set():
            torch.mm(matrix, matrix)
            spent[0] = time.thread_time()

    thread = threading.Thread(target=work, name="weft-busy", daemon=True)
    if wanted:
        thread.start()
    try:
        yield lambda: spent[0]
    finally:
        stop.set()
        if wanted:
            thread.join()
