"""The form of every compression: a pair (init, update), after the gradient transformations of Optax; and how two
chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weft.errors import UsageError
from weft.reduce.channels import channels_of
from weft.reduce.collective import Collective
from weft.reduce.exchange import Exchange, exchange
from weft.reduce.hierarchical import Hierarchical

Init = Callable[[int, torch.dtype, torch.device, int], Any]
Update = Callable[[Any, torch.Tensor, Collective], torch.Tensor]


class Compression(NamedTuple):
    """A way to average flat tensors over ranks with fewer bytes.

    Attributes:
        init: ``init(numel, dtype, device, ranks)`` makes the state of one tensor: errors to feed back, buffers.
            Every tensor that is averaged step after step has its own.
        update: ``update(state, flat, collective)`` replaces ``flat`` (1-D, contiguous, floating point) by its average
            over the ranks as it comes through the compression, changes the state, and returns ``flat``. Every rank
            gets the same bits. A value that is not finite on any rank gives one that is not finite on every rank, so
            that a gradient scaler sees it, and is not kept in the state.
    """

    init: Init
    update: Update

    @property
    def divisible(self) -> bool:
        """True if pieces of a tensor can be averaged one by one; see :class:`Divisible`."""
        return False


class Divisible(Compression):
    """One for which pieces of a tensor can be averaged one by one, each with a state of its own, for the same bytes and
    as good a result."""

    @property
    def divisible(self) -> bool:
        return True


class Chained:
    """A collective whose sums go through a compression; everything else goes to the collective below.

    Made anew for each update: the i-th sum of an update has the i-th state.
    """

    def __init__(self, below: Exchange, compression: Compression, states: dict[Any, Any]) -> None:
        self._below = below
        self._compression = compression
        self._states = states
        self._calls = 0
        self.size = below.size
        self.rank = below.rank
        self.group = below.group
        self.all_gather = below.all_gather
        self.all_to_all = below.all_to_all

    def all_reduce(self, flat: torch.Tensor) -> Chained:
        """Replace ``flat`` by ``size`` times its average; done on return."""
        key = (self._calls, flat.numel(), flat.dtype, flat.device)
        self._calls += 1
        if key not in self._states:
            self._states[key] = self._compression.init(*key[1:], self.size)
        self._compression.update(self._states[key], flat, self._below).mul_(self.size)
        return self

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is held."""


def chain(first: Compression, second: Compression) -> Compression:
    """``first``, with its sums through ``second``: ``chain(fp16, topk)`` selects among half-precision values.

    ``int8``, ``topk`` and ``powersgd`` send messages of their own instead of sums, so one of them ends a chain.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> Any:
        return first.init(numel, dtype, device, ranks), {}

    def update(state: Any, flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        own, states = state
        return first.update(own, flat, Chained(exchange(collective), second, states))

    kind = Divisible if first.divisible and second.divisible else Compression
    return kind(init, update)


def between_hosts(compression: Compression) -> Compression:
    """The same, but over a ``Hierarchical`` collective only what goes between hosts is compressed.

    Inside a host shards are summed exactly; the state is that of this rank's shard.
    """

    def init(numel: int, dtype: torch.dtype, device: torch.device, ranks: int) -> dict[Any, Any]:
        if not dtype.is_floating_point:
            raise UsageError(
                f"gradients of {dtype} cannot be compressed: leave them out, or compress floating point only"
            )
        return {}

    def update(state: dict[Any, Any], flat: torch.Tensor, collective: Collective) -> torch.Tensor:
        def average(part: torch.Tensor, ranks: Collective) -> torch.Tensor:
            key = (part.numel(), part.dtype, part.device)
            if key not in state:
                state[key] = compression.init(*key, ranks.size)
            return compression.update(state[key], part, ranks)

        collective = channels_of(collective)[0]
        if collective.size == 1:
            return flat
        if not isinstance(collective, Hierarchical):
            return average(flat, collective)
        # Scaled before the sum, which could overflow.
        collective.through(
            flat, lambda shard: average(shard, collective.between), scale=1 / collective.inside.size
        )
        return flat

    return type(compression)(init, update)
