"""A process group of two ranks in one process, for channels without gloo: as much of a group as `TorchChannel` uses."""

from __future__ import annotations

import queue
from collections import Counter, defaultdict
from datetime import timedelta

import torch
from torch import Tensor

from weft.transport.rings import Rings
from weft.transport.torch_dist import TorchChannel


class Done:
    """A send that needs no waiting."""

    def wait(self) -> bool:
        return True


class Arrival:
    """A receive; like gloo's, it takes messages that are shorter than its buffer."""

    def __init__(self, buffer: Tensor, messages: queue.SimpleQueue[Tensor]) -> None:
        self._buffer, self._messages = buffer, messages

    def wait(self, timeout: timedelta | None = None) -> bool:
        content = self._messages.get()
        self._buffer[: len(content)] = content
        return True


class Wire:
    """The messages from one rank to the other: a queue for each tag, and how many were sent with it."""

    def __init__(self) -> None:
        self.queues: defaultdict[int, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.sent: Counter[int] = Counter()

    def send(self, content: Tensor, tag: int) -> None:
        self.sent[tag] += 1
        self.queues[tag].put(content.clone())


class Group:
    """One rank's end of two wires."""

    def __init__(self, rank: int, out: Wire, back: Wire) -> None:
        self._rank, self.out, self.back = rank, out, back

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        self.out.send(tensors[0], tag)
        return Done()

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Arrival:
        return Arrival(tensors[0], self.back.queues[tag])


class Pair:
    """The channels of both ranks."""

    def __init__(self, device: str = "cpu", rings: tuple[Rings | None, Rings | None] = (None, None)) -> None:
        there, back = Wire(), Wire()
        self.wire = there
        groups = Group(0, there, back), Group(1, back, there)
        self.channels = [
            TorchChannel(group, torch.device(device), rings=of_rank, ranks=[0, 1])
            for group, of_rank in zip(groups, rings, strict=True)
        ]

    def close(self) -> None:
        """Ends the channels' threads."""
        for channel in self.channels:
            channel.close()
        for channel in self.channels:
            channel.join()
