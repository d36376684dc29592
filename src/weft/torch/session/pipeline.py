"""The state that all microbatches of a pipeline share on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.runtime.microbatch import Microbatch
from weft.torch.calls.attributes import Own
from weft.torch.calls.call_signature import Spec
from weft.torch.pytorch.private import version
from weft.torch.session.random_streams import Streams, mix
from weft.transport.channel import Channel


class SharedBuffer:
    """A buffer that the code between units writes. Microbatches must use such a buffer one after the other."""

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name, self._buffer = name, buffer
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._version = version(self._buffer)
        self._user = self._latest = self._writer = -1

    def use(self, microbatch: int) -> None:
        """A microbatch reads or writes the buffer.

        Raises:
            UsageError: A later microbatch has used the buffer already, and one of the two writes into it.
        """
        self.end()
        if self._writer > microbatch:
            self._refuse(microbatch, self._writer)
        self._user, self._latest = microbatch, max(self._latest, microbatch)

    def end(self) -> None:
        """Notice whether the microbatch that used the buffer last has written into it."""
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
"""The most signatures of calls that are kept, or four times as many as a step has. Each new shape of a batch brings one
for each call, and a signature takes up to 2 KiB."""


@dataclass
class Pipeline:
    """The state that all microbatches of a pipeline share on this rank.

    Attributes:
        rank: Which partition this rank runs.
        size: How many partitions there are.
        streams: The random number generators of this process.
        seed: What the random numbers of the present step follow from; the same on all ranks.
        drawing: The microbatch whose random states are the process's now.
        specs: What is known of calls, by signature.
        announced: The signatures that this rank has sent to the others.
        own: The attributes of modules that each microbatch has for itself.
        buffers: The buffers of this rank that the code between units writes, by id.
        filled: The lists, dicts and objects that units of running microbatches have filled, by id, with the microbatch.
        fuses: Whether a weight of this rank gains by being added to its gradient in one call.
        replicas: How many replicas there are.
        units: How many units have a number.
        logs: The signatures of the calls of each microbatch in the present step, in order.
        calls: The numbers of calls, by signature; see ``differing_calls``.
        latest: The numbers of the calls of the last step, by rank, as the ranks have sent them.
        texts: The texts of calls, by number.
        generation: How often old signatures were forgotten.
        gathering: What gathers parameters for each microbatch, by model; empty where none does.
        proof: Notes the numbers of a step that is compared with one process; see ``verify``.
        note: Reports to the monitor what this rank does.
        offload: Around an activation checkpoint: what it keeps is in host memory, if the settings say so.
    """

    rank: int
    size: int
    device: torch.device
    channel: Channel
    streams: Streams
    seed: int = 0
    drawing: Microbatch | None = None
    specs: dict[Any, Spec] = field(default_factory=dict)
    announced: set[Any] = field(default_factory=set)
    own: Own = field(default_factory=Own)
    buffers: dict[int, SharedBuffer] = field(default_factory=dict)
    filled: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    fuses: bool = False
    replicas: int = 1
    units: int = 0
    logs: dict[int, list[Any]] = field(default_factory=dict)
    calls: dict[Any, int] = field(default_factory=dict)
    latest: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    generation: int = 0
    gathering: list[Any] = field(default_factory=list)
    proof: Any = None
    note: Callable[..., None] = lambda *args: None
    offload: Callable[[], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def backward(self, later: bool = False) -> Iterator[None]:
        """Around autograd's run; ``later``: weights' gradients come later."""
        with ExitStack() as stack:
            if self.own:
                stack.enter_context(self.own.as_forward_left())
            for each in self.gathering:
                stack.enter_context(each.backward(later))
            yield

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

    def draw_for(self, microbatch: Microbatch) -> None:
        """Bring in a microbatch's own random states, unless they are there still; those of the one before are kept."""
        streams, own, before = self.streams, self.own, self.drawing
        if before is microbatch:
            return
        if before is not None and not before.done:
            before.kept = streams.capture()
        if own and before is not None:
            before.held = own.take()
        if own:
            own.put(own.first if microbatch.held is None else microbatch.held)
            microbatch.held = None
        self.drawing = microbatch
        if microbatch.kept is None:
            streams.seed(mix(self.seed, microbatch.index))
        else:
            streams.restore(microbatch.kept)

    def end_draws(self, states: Any) -> None:
        """All microbatches have drawn: the process goes on with these random states."""
        self.drawing = None
        self.streams.restore(states)

    def forget_old_calls(self) -> None:
        """Where too many signatures are known at the end of a step, keep those of this step only.

        Every rank makes the same calls, so all ranks forget the same signatures at the same step. What ranks send from
        then on belongs to the next generation, so a rank that is ahead is never mistaken for one that repeats a call.
        """
        if len(self.specs) <= MOST_CALLS:
            return
        used = {key for log in self.logs.values() for key in log}
        if len(self.specs) > max(MOST_CALLS, 4 * len(used)):
            self.specs = {key: spec for key, spec in self.specs.items() if key in used}
            self.announced &= used
            self.generation += 1

    def forget_calls(self) -> None:
        """Between two steps: units are elsewhere from now on, and all that is known of calls is learned anew."""
        self.specs, self.announced = {}, set()
        self.generation += 1

    def next_serial(self) -> int:
        """A number for a new unit, the same on every rank, so that units of two models are never mistaken."""
        self.units += 1
        return self.units

    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
