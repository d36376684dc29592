"""A host: its accelerators, the links inside, the network outside, memory, price; and many of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError
from weft.machines.accelerator import Accelerator
from weft.machines.storage import MOST, SERVICES, Prices, Service, check_prices
from weft.topology.cluster import Link


@dataclass(frozen=True)
class Conduct:
    """The conduct of a host's ranks together: what overlaps what, and how much they vary.

    Attributes:
        tensor: Share of what tensor-parallel ranks exchange that runs beside products, from 0 to 1.
        data: Share of the sum of gradients that runs beside backward passes, from 0 to 1.
        parameters: Share of the exchange of sharded parameters that runs beside computation, from 0 to 1.
        ring: Share of the network's bandwidth that rings over many hosts reach, from 0 to 1.
        crossing_s: What a rank loses by sending to the next stage and receiving from it, besides the transfer.
        spread: How far single ranks vary, as a share of the step.
    """

    tensor: float = 0.0
    data: float = 0.5
    parameters: float = 0.5
    ring: float = 0.5
    crossing_s: float = 0.0
    spread: float = 0.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}, it must be from 0 to 1"
            for name in ("tensor", "data", "parameters", "ring", "spread")
            if not 0 <= (value := getattr(self, name)) <= 1
        ]
        if not 0 <= self.crossing_s < math.inf:
            faults.append(f"crossing_s is {self.crossing_s}, it must not be negative")
        if self.ring == 0:
            faults.append("ring is 0, it must be above 0")
        if faults:
            raise ConfigError(f"conduct: {'; '.join(faults)}")

    def late(self, ranks: int) -> float:
        """By what share of the step the slowest of so many ranks is late: `spread * sqrt(2 ln n)`.

        The expected largest of n normal values is about that (Cramer, "Mathematical Methods of Statistics", 28.6).

        >>> Conduct(spread=0.01).late(1), round(Conduct(spread=0.01).late(1024), 4)
        (0.0, 0.0372)
        """
        return self.spread * math.sqrt(2 * math.log(max(1, ranks)))


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: What it is called, for example an instance type.
        accelerator: What it has.
        accelerators: How many of them.
        inside: What a rank's tensors take to another one of the host: bandwidth in one direction, as a ring of all its
            ranks reaches it, and latency of a step of that ring.
        network: What they take to another host: each accelerator's share of the network cards.
        memory_bytes: The host's own memory; 0 if that is not known.
        price_per_hour: What it costs; not known if None.
        conduct: How its ranks work together.
        storage_bytes_per_s: What its own disks give, reading; 0 if that is not known.
        storage_bytes: What they hold; 0 if that is not known.
        storage_assumed: What of these two no document states, in words.
        sharing: What its ranks take to exchange parameters that they share; as other tensors if None.
        services: What it can read from over the network, by name.
        storage_prices: What of that costs how much, and file systems; empty if no price is known.
        sums: What its ranks take to add up tensors of layers that are cut over them; as other tensors if None.
        tokens: What they take to gather such tensors by tokens and to hand out their sum; as sums if None.
    """

    name: str
    accelerator: Accelerator
    accelerators: int
    inside: Link
    network: Link
    memory_bytes: int = 0
    price_per_hour: float | None = None
    conduct: Conduct = field(default_factory=Conduct)
    storage_bytes_per_s: float = 0.0
    storage_bytes: int = 0
    storage_assumed: str = ""
    sharing: Link | None = None
    services: Mapping[str, Service] = field(default_factory=lambda: SERVICES)
    storage_prices: Prices = field(default_factory=dict)
    sums: Link | None = None
    tokens: Link | None = None

    def __post_init__(self) -> None:
        if self.accelerators < 1:
            raise ConfigError(
                f'host "{self.name}" has {self.accelerators} accelerators, it must have at least 1'
            )
        if self.price_per_hour is not None and not 0 <= self.price_per_hour <= MOST:
            raise ConfigError(
                f'host "{self.name}" costs {self.price_per_hour} an hour, it must be a number from 0 to {MOST:,.0f}'
            )
        check_prices(self.storage_prices)


@dataclass(frozen=True)
class Machines:
    """Equal hosts.

    Ranks are numbered host by host.
    """

    host: Host
    hosts: int

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ConfigError(f"there are {self.hosts} hosts, give at least 1: 4x8xA100-80")

    @property
    def size(self) -> int:
        """The number of accelerators."""
        return self.hosts * self.host.accelerators

    @property
    def price_per_hour(self) -> float | None:
        """The price of all hosts for an hour, if that is known."""
        return None if self.host.price_per_hour is None else self.hosts * self.host.price_per_hour

    def ring(self, ranks: int, stride: int) -> Link:
        """The slowest link of a ring of `ranks`, `stride` apart, as every host has as many of them.

        With g members of the ring on each host, g network cards carry its traffic between hosts: NCCL builds as many
        rings as there are cards. So the bandwidth is the lower one of `inside` and g times `network`.
        """
        here = max(1, min(ranks, self.host.accelerators // max(1, stride)))
        if ranks <= here:
            return self.host.inside
        between = here * self.host.network.bytes_per_s * self.host.conduct.ring
        inside = self.host.inside.bytes_per_s if here > 1 else math.inf
        return Link(self.host.network.latency_s, min(inside, between))

    def sharing_ring(self, ranks: int, stride: int) -> Link:
        """The same for parameters that these ranks share: as `sharing` says inside of a host, if that is known."""
        inside = self.host.sharing
        here = ranks <= max(1, self.host.accelerators // max(1, stride))
        return inside if here and inside is not None else self.ring(ranks, stride)

    def tensor_ring(self, ranks: int, along: bool) -> Link:
        """The same for tensors of layers that are cut over these ranks: as `tokens` (`along`: each rank has some of
        them only) or `sums` says inside of a host, if that is known."""
        inside = self.host.tokens if along and self.host.tokens is not None else self.host.sums
        return inside if inside is not None and ranks <= self.host.accelerators else self.ring(ranks, 1)

    def all_to_all_s(self, size: float, ranks: int, stride: int) -> float:
        """The seconds each of `ranks`, `stride` apart, takes to send an equal part of its `size` bytes to each other
        one.

            max(bytes to the same host / inside, bytes to other hosts / network) + (n - 1) latency

        Pairwise exchange (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005, section
        3.4); to both at once. Of the network so much is reached as by rings.

        >>> host = Host("h", Accelerator("a", 1, 1.0, {"fp16": 1.0}), 2, Link(0.0, 4e9), Link(0.0, 1e9))
        >>> Machines(host, 2).all_to_all_s(4e9, 4, 1), Machines(host, 1).all_to_all_s(4e9, 2, 1)
        (4.0, 0.5)
        """
        if ranks == 1:
            return 0.0
        here = max(1, min(ranks, self.host.accelerators // max(1, stride)))
        inside, network = self.host.inside, self.host.network
        seconds = (here - 1) / ranks * size / inside.bytes_per_s
        if ranks <= here:
            return seconds + (ranks - 1) * inside.latency_s
        across = (ranks - here) / ranks * size / (network.bytes_per_s * self.host.conduct.ring)
        return max(seconds, across) + (ranks - 1) * network.latency_s

    def hop_s(self, size: float, stride: int) -> float:
        """The seconds that `size` bytes take from a rank to the one `stride` further on: the mean over all ranks.

        Of the ranks of a host with g accelerators, `stride` have their next one on another host.
        """
        across = min(1.0, stride / self.host.accelerators) if self.hosts > 1 else 0.0
        return across * self.host.network.transfer_s(size) + (1 - across) * self.host.inside.transfer_s(size)
