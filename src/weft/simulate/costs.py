"""Costs of the stages, and links between their ranks, as the engine needs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import ConfigError
from weft.topology.cluster import Link


@dataclass(frozen=True)
class StageCost:
    """One stage, for one microbatch.

    Attributes:
        forward_s: Time of F, in seconds.
        backward_s: Time of B, the whole backward pass.
        input_s: Time of I, the backward pass for the inputs only.
        weight_s: Time of W, the backward pass for the weights only.
        forward_bytes: What F sends to the next stage.
        backward_bytes: What B or I sends to the previous stage.
        activation_bytes: What is kept from the start of F to the end of B or I.
        weight_bytes: The part of these (and of `transient_bytes`) that stays from the end of I to the end of W.
        parameter_bytes: The parameters, once.
        transient_bytes: What B or I takes besides, while it runs: activations that are computed anew.

    >>> StageCost(forward_s=1.0, backward_s=-2.0)
    Traceback (most recent call last):
    weft.errors.ConfigError: a stage's backward_s is -2.0, it must be a finite number that is not negative
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    forward_bytes: int = 0
    backward_bytes: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    parameter_bytes: int = 0
    transient_bytes: int = 0

    def __post_init__(self) -> None:
        faults = [
            f"a stage's {name} is {value}, it must be a finite number that is not negative"
            for name, value in vars(self).items()
            if not 0 <= value < math.inf
        ]
        if self.weight_bytes > self.activation_bytes + self.transient_bytes:
            and_transient = f" and {self.transient_bytes} transient" if self.transient_bytes else ""
            faults.append(
                f"a stage's weight_bytes are {self.weight_bytes}, more than its activation_bytes, "
                f"{self.activation_bytes}{and_transient}, of which they are a part"
            )
        if faults:
            raise ConfigError("; ".join(faults))


class Edge(NamedTuple):
    """A tensor that skips stages: F of `source` sends it to F of `target`, whose backward sends its gradient."""

    source: int
    target: int
    bytes: int


def _no_link(sender: int, receiver: int) -> Link:
    return Link(name="none")


@dataclass(frozen=True)
class Links:
    """The links between ranks.

    Attributes:
        between: The link from one rank to another, for example `Cluster.link`; takes no time if not given.
        overlap: Whether ranks go on computing during a transfer. If not, it keeps both of them busy.
        overhead_s: What a crossing costs the processor, once on each side, in seconds.
    """

    between: Callable[[int, int], Link] = _no_link
    overlap: bool = True
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.overhead_s < math.inf:
            raise ConfigError(
                f"overhead_s is {self.overhead_s}, it must be a finite number that is not negative"
            )

    @classmethod
    def uniform(cls, link: Link, overlap: bool = True, overhead_s: float = 0.0) -> Links:
        """The same `link` between all ranks."""
        return cls(lambda sender, receiver: link, overlap, overhead_s)


FREE = Links()
"""Tensors take no time."""
