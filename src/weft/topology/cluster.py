"""Hosts and what connects them: which link a tensor takes from one rank to another, and how long.

Ranks are numbered host by host. Two ranks of one host are connected by its intra-host link, ranks of two
hosts by the inter-host link.

A link that is not shared gives every transfer its whole bandwidth. A shared one carries one transfer at a
time; how it is shared depends on where it is:

    intra-host   all ranks of one host use the same link (a bus)
    inter-host   all ranks of one host send over the same link (its network card); the two directions do
                 not disturb each other, and what a host receives is not limited
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from weft.errors import ConfigError, FormatError, UsageError
from weft.units import parse_rate, parse_seconds
from weft.untrusted import shown_text

EXAMPLE = "25GB/s,5us"


@dataclass(frozen=True)
class Link:
    """A link between ranks: a transfer of `n` bytes takes `latency_s + n / bytes_per_s` seconds.

    Attributes:
        latency_s: From the first byte sent to the first byte received, in seconds.
        bytes_per_s: The bandwidth, in bytes a second; infinite if not given.
        shared: Whether transfers wait for each other. Each occupies the link for `n / bytes_per_s`.
        name: What it is called; shared links of the same name are one link.

    >>> link = Link.parse("25GB/s,2us")
    >>> link.latency_s, link.bytes_per_s, link.transfer_s(50_000_000)
    (2e-06, 25000000000.0, 0.002002)
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    shared: bool = False
    name: str = "link"

    def __post_init__(self) -> None:
        faults = []
        if not 0.0 <= self.latency_s < math.inf:
            faults.append(f"its latency is {self.latency_s} s, it must be a number that is not negative")
        if not self.bytes_per_s > 0.0:
            faults.append(f"its bandwidth is {self.bytes_per_s} bytes/s, it must be more than 0")
        if faults:
            raise ConfigError(f'link "{self.name}": {"; ".join(faults)}')

    @classmethod
    def parse(cls, text: str, name: str = "link") -> Link:
        """A link from a bandwidth, a latency and the word `shared`, in any order, each at most once.

        >>> Link.parse("2us").transfer_s(10**9)
        2e-06
        >>> Link.parse("12.5GB/s, 10us, shared").shared
        True
        """
        text, given = shown_text(text), text
        found: dict[str, float] = {}
        for part in (part.strip() for part in given.split(",")):
            field, value = _parse_part(part, text)
            if field in found:
                raise FormatError(f'"{text}" is not a link: it has {_FIELDS[field]} twice')
            found[field] = value
        if found.keys() <= {"shared"}:
            raise FormatError(
                f'"{text}" is not a link: it has neither bandwidth nor latency, write "{EXAMPLE}"'
            )
        return cls(
            found.get("latency_s", 0.0), found.get("bytes_per_s", math.inf), "shared" in found, name=name
        )

    def occupied_s(self, size: float) -> float:
        """The seconds that a transfer of `size` bytes keeps a shared link from the next one."""
        return size / self.bytes_per_s

    def transfer_s(self, size: float) -> float:
        """From the first byte sent to the last one received, in seconds, for `size` bytes."""
        return self.latency_s + self.occupied_s(size)


_FIELDS = {"latency_s": "a latency", "bytes_per_s": "a bandwidth", "shared": "the word shared"}


def _parse_part(part: str, text: str) -> tuple[str, float]:
    if part == "shared":
        return "shared", 1.0
    field, parse = ("bytes_per_s", parse_rate) if "/" in part else ("latency_s", parse_seconds)
    try:
        return field, parse(part)
    except FormatError as error:
        raise FormatError(f'"{text}" is not a link, write for example "{EXAMPLE}": {error}') from None


@dataclass(frozen=True)
class Cluster:
    """Hosts in the order of their ranks, and the links inside and between them.

    >>> cluster = Cluster((2, 2), Link.parse("300GB/s,2us"), Link.parse("25GB/s,5us,shared"))
    >>> cluster.link(0, 1).name, cluster.link(1, 2).name, cluster.link(2, 0).name
    ('host 0 intra-host', 'host 0 inter-host', 'host 1 inter-host')
    """

    ranks_per_host: tuple[int, ...]
    intra_host: Link = Link()
    inter_host: Link = Link()

    def __post_init__(self) -> None:
        faults = [
            f"host {host} has {ranks} ranks, it must have at least 1"
            for host, ranks in enumerate(self.ranks_per_host)
            if ranks < 1
        ]
        if not self.ranks_per_host:
            faults.append("the cluster has no host, give the number of ranks of each: (8, 8)")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.ranks_per_host)

    def host_of(self, rank: int) -> int:
        """The host on which `rank` runs."""
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}, the cluster has {self.size}")
        host, first = 0, self.ranks_per_host[0]
        while rank >= first:
            host += 1
            first += self.ranks_per_host[host]
        return host

    def link(self, sender: int, receiver: int) -> Link:
        """The link from `sender` to `receiver`; shared links have different names."""
        here, there = self.host_of(sender), self.host_of(receiver)
        kind, link = ("intra-host", self.intra_host) if here == there else ("inter-host", self.inter_host)
        return replace(link, name=f"host {here} {kind}")
