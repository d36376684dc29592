"""Reductions in flight, one behind the other: what the reducer launches and later waits for.

An algorithm starts by itself and goes on while the backward pass does. A compressor computes between its messages, so
each channel of the collective has a thread for it, which takes what is launched there in order: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from weft.reduce.channels import COMPRESSED_BYTES, AllWorks, channels_of, cut
from weft.reduce.choice import BySize
from weft.reduce.collective import Collective, SumsPieces, Work
from weft.reduce.worker import Worker


class Compression(Protocol):
    """A pair: ``init`` makes what ``update`` keeps from step to step for one bucket (errors to feed back, say).

    ``update(state, flat, collective)`` returns the average of ``flat`` over the ranks, as it arrives through the
    compression; it may write into ``flat``. ``divisible``: whether pieces of a tensor can be averaged one by one.
    """

    @property
    def divisible(self) -> bool: ...

    @property
    def init(self) -> Callable[[int, torch.dtype, torch.device, int], Any]: ...

    @property
    def update(self) -> Callable[[Any, torch.Tensor, Collective], torch.Tensor]: ...


class AllReduceQueue:
    """Averages flat tensors over the ranks of ``collective``, through ``compression`` if there is one.

    ``scale``: what the caller multiplies a tensor by before it is launched, which costs nothing where it is
    copied anyway: a sum of ``1 / ranks`` parts is the average, and in fp16 it cannot overflow.
    """

    def __init__(self, collective: Collective, compression: Compression | None = None) -> None:
        self.collective = collective
        self.compression = compression
        self.scale = 1.0 / collective.size if compression is None else 1.0
        self._channels = [(channel, Worker("weft-reduce")) for channel in channels_of(collective)]
        self._states: dict[Any, Any] = {}

    def launch(self, number: int, flat: torch.Tensor) -> Work:
        """Start to replace ``flat`` (1-D, contiguous, scaled) by the average; ``number`` names it in every step."""
        if self.compression is None:
            return self.collective.all_reduce(flat)
        several = self.compression.divisible and len(self._channels) > 1
        pieces = cut(flat, COMPRESSED_BYTES) if several else [flat]
        return AllWorks([self._start(self.compression, (number, i), piece) for i, piece in enumerate(pieces)])

    def in_place(self, size_bytes: int) -> SumsPieces | None:
        """The collective that averages so many bytes of gradients where they are, without a flat tensor; ``None`` if
        none does."""
        collective = self.collective
        if isinstance(collective, BySize):
            collective = collective.find(size_bytes)
        return collective if self.compression is None and isinstance(collective, SumsPieces) else None

    def _start(self, compression: Compression, name: tuple[int, int], flat: torch.Tensor) -> Work:
        """Average a piece; it has a state, and a channel, for good."""
        kept = (*name, flat.numel(), flat.dtype, flat.device)
        if kept not in self._states:
            turn = len(self._states) % len(self._channels)
            self._states[kept] = (compression.init(*kept[2:], self.collective.size), *self._channels[turn])
        state, channel, worker = self._states[kept]
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None

        def step() -> None:
            with torch.cuda.stream(stream):
                result = compression.update(state, flat, channel)
                if result is not flat:
                    flat.copy_(result.view_as(flat))

        return worker.start(step)

    def forget(self) -> None:
        """Other buckets come from now on: what was kept for the old ones is of no use."""
        self._states.clear()

    def close(self) -> None:
        """End the threads and the collective; nothing is in flight."""
        for _, worker in self._channels:
            worker.close()
        self.collective.close()
