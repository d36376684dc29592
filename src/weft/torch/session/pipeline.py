"""What all microbatches of a pipeline share on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.torch.calls.attributes import Own
from weft.torch.calls.call_signature import Spec
from weft.torch.pytorch.private import version
from weft.torch.session.random_streams import Streams
from weft.transport.channel import Channel


class SharedBuffer:
    """A buffer that the code between units writes: microbatches must use it one after the other."""

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self._buffer = name, buffer
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._version = version(self._buffer)
        self._user = self._latest = self._writer = -1

    def use(self, microbatch: int) -> None:
        """It is read or written by a microbatch.

        Raises:
            UsageError: A later one has used it, and one of both writes it.
        """
        self.end()
        if self._writer > microbatch:
            self._refuse(microbatch, self._writer)
        self._user, self._latest = microbatch, max(self._latest, microbatch)

    def end(self) -> None:
        """Notice what was written by the one that used it last."""
        if self._version != version(self._buffer):
            self._version, self._writer = version(self._buffer), max(self._writer, self._user)
            if self._latest > self._user:
                self._refuse(self._user, self._latest)

    def _refuse(self, earlier: int, later: int) -> None:
        raise UsageError(
            f"{self.name} is a buffer of a module that is split over partitions. Microbatch {later} used it before "
            f"microbatch {earlier} was done with it, so their results would not be those of one process: put the "
            "module on one partition as a whole, weft.set_partition(module, index), or let it use the buffer before "
            "it calls other modules"
        )


MOST_CALLS = 10_000
"""So many signatures are known at most, or four times as many as a step has: each new shape of a batch has one for each
call, which takes up to 2 KiB."""


@dataclass
class Pipeline:
    """What all microbatches of a pipeline share on this rank.

    ``specs``: what is known of calls, by signature; ``told``: the signatures that this rank has told the others;
    ``own``: the attributes that each microbatch has for itself; ``fuses``: whether a weight of this rank gains by being
    added to its gradient in one call; ``replicas``: how many copies of the model there are; ``buffers``: those of this
    rank that the code between units writes, by id; ``proof``: what notes the numbers of a step that is compared with
    one process (see ``verify``); ``logs``: of each microbatch of the present step the signatures of its
    calls, in order; ``calls``: their numbers; ``latest``: those of the last step by rank, as the ranks have told them,
    and ``texts`` by number (see ``diverging``); ``generation``: how often old ones were forgotten.
    """

    rank: int
    size: int
    device: torch.device
    channel: Channel
    streams: Streams
    specs: dict[Any, Spec] = field(default_factory=dict)
    told: set[Any] = field(default_factory=set)
    own: Own = field(default_factory=Own)
    buffers: dict[int, SharedBuffer] = field(default_factory=dict)
    fuses: bool = False
    replicas: int = 1
    units: int = 0
    logs: dict[int, list[Any]] = field(default_factory=dict)
    calls: dict[Any, int] = field(default_factory=dict)
    latest: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    generation: int = 0
    proof: Any = None
    note: Callable[..., None] = lambda *args: None

    def begin_step(self) -> None:
        """A step begins: what belongs to single microbatches is that of none yet."""
        self.own.begin()
        for buffer in self.buffers.values():
            buffer.begin()

    def end_step(self) -> None:
        """All microbatches of a step have run."""
        self.own.end()
        for buffer in self.buffers.values():
            buffer.end()

    def forget_old_calls(self) -> None:
        """At the end of a step: where too many signatures are known, keep those of this step only.

        Every rank makes the same calls, so all forget the same ones at the same step. What is told from then on belongs
        to the next generation: a rank that is ahead is never mistaken for one that repeats an older call.
        """
        if len(self.specs) <= MOST_CALLS:
            return
        used = {key for log in self.logs.values() for key in log}
        if len(self.specs) > max(MOST_CALLS, 4 * len(used)):
            self.specs = {key: spec for key, spec in self.specs.items() if key in used}
            self.told &= used
            self.generation += 1

    def next_serial(self) -> int:
        """A number for a new unit, the same on every rank, so that units of two models are never mistaken."""
        self.units += 1
        return self.units

    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
