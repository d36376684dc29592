"""Reductions in flight, one behind the other: what the reducer launches and later waits for.

An algorithm starts by itself and goes on while the backward pass does. A compressor computes between its messages, so
it has a thread, which takes buckets in the order in which they were launched: the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from weft.reduce.collective import Collective, Work


class Compression(Protocol):
    """A pair: ``init`` makes what ``update`` keeps from step to step for one bucket (errors to feed back, say).

    ``update(state, flat, collective)`` returns the average of ``flat`` over the ranks, as it arrives through the
    compression; it may write into ``flat``.
    """

    @property
    def init(self) -> Callable[[int, torch.dtype, torch.device, int], Any]: ...

    @property
    def update(self) -> Callable[[Any, torch.Tensor, Collective], torch.Tensor]: ...


class Later:
    """A work that a thread does."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self._future.result()


class Lane:
    """Averages flat tensors over the ranks of ``collective``, through ``compression`` if there is one.

    ``scale``: what the caller multiplies a tensor by before it is launched, which costs nothing where it is
    copied anyway: a sum of ``1 / ranks`` parts is the average, and in fp16 it cannot overflow.
    """

    def __init__(self, collective: Collective, compression: Compression | None = None) -> None:
        self.collective = collective
        self.compression = compression
        self.scale = 1.0 / collective.size if compression is None else 1.0
        self._states: dict[Any, Any] = {}
        self._thread: ThreadPoolExecutor | None = None

    def launch(self, number: int, flat: torch.Tensor) -> Work:
        """Start to replace ``flat`` (1-D, contiguous, scaled) by the average; ``number`` names it in every step."""
        if self.compression is None:
            return self.collective.all_reduce(flat)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weft-reduce")
        kept = (number, flat.numel(), flat.dtype, flat.device)
        if kept not in self._states:
            self._states[kept] = self.compression.init(*kept[1:], self.collective.size)
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        return Later(self._thread.submit(self._compressed, self._states[kept], flat, stream))

    @torch.no_grad()
    def _compressed(self, state: Any, flat: torch.Tensor, stream: Any) -> None:
        assert self.compression is not None
        with torch.cuda.stream(stream):
            result = self.compression.update(state, flat, self.collective)
            if result is not flat:
                flat.copy_(result.view_as(flat))

    def forget(self) -> None:
        """Other buckets come from now on: what was kept for the old ones is of no use."""
        self._states.clear()

    def close(self) -> None:
        """End the thread and the collective; nothing is in flight."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self.collective.close()
