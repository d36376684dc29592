"""What all microbatches of a pipeline share on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.torch.attributes import Own
from weft.torch.random_state import Streams
from weft.torch.signature import Spec
from weft.transport.channel import Channel


@dataclass
class Pipeline:
    """What all microbatches of a pipeline share on this rank.

    ``specs``: what is known of calls, by signature; ``told``: the signatures that this rank has told the others;
    ``own``: the attributes that each microbatch has for itself; ``fuses``: whether a weight of this rank gains by being
    added to its gradient in one call; ``replicas``: how many copies of the model there are; ``proof``:
    what notes the numbers of a step that is compared with one process (see ``verify``).
    """

    rank: int
    size: int
    device: torch.device
    channel: Channel
    streams: Streams
    specs: dict[Any, Spec] = field(default_factory=dict)
    told: set[Any] = field(default_factory=set)
    own: Own = field(default_factory=Own)
    fuses: bool = False
    replicas: int = 1
    units: int = 0
    proof: Any = None
    note: Callable[..., None] = lambda *args: None

    def next_serial(self) -> int:
        """A number for a new unit, the same on every rank, so that units of two models are never mistaken."""
        self.units += 1
        return self.units

    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]
