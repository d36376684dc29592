"""Sums in two levels, for hosts that are fast inside and slow between.

For N bytes, L ranks on each of H hosts:

    1. reduce-scatter inside the host: rank l of L has the host's sum of shard l         (N/L bytes stay)
    2. all-reduce of shard l between the l-th ranks of all hosts: L such groups at once
    3. all-gather inside the host

Between hosts each rank sends ``2 (H - 1) / H * N / L`` bytes, the same for every bucket and every rank, which is the
idea of balanced shards in Thangakrishnan et al., "Herring: Rethinking the Parameter Server at Scale for the Cloud"
(SC20), with the workers themselves in the servers' place. A host sends ``2 (H - 1) / H * N`` bytes, where a ring
over all ranks (gloo, NCCL) makes it send ``2 (HL - 1) / (HL) * N``: 1 N against 1.5 N for two hosts of two ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from weft.errors import ConfigError
from weft.reduce.exchange import Exchange, GroupExchange, subgroup, sum_of_own_shard
from weft.reduce.shared import TIMEOUT, HostMemory, check
from weft.reduce.worker import Job, Queued, Worker


class Inside(Protocol):
    """The ranks of one host. The calls return when the result is there (on CUDA: queued)."""

    @property
    def size(self) -> int:
        """The number of ranks on this host."""

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor, as a view."""

    def reduce_scatter(self, flat: torch.Tensor, scale: float = 1.0) -> None:
        """Replace this rank's shard by the host's sum of ``scale`` times it."""

    def all_gather(self, flat: torch.Tensor) -> None:
        """Replace the other shards by those ranks' values."""

    def close(self) -> None:
        """Give back what it holds."""


class HostGroup:
    """``Inside`` through a process group of the host's ranks (NCCL). The tensor's length is a multiple of ``size``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._exchange = GroupExchange(group)

    @property
    def size(self) -> int:
        return self._exchange.size

    def shard(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.size, -1)[self._exchange.rank]

    def reduce_scatter(self, flat: torch.Tensor, scale: float = 1.0) -> None:
        if scale != 1.0:
            flat.mul_(scale)
        self.shard(flat).copy_(sum_of_own_shard(flat, self._exchange.group))

    def all_gather(self, flat: torch.Tensor) -> None:
        flat.copy_(self._exchange.all_gather(self.shard(flat).clone()).view(-1))

    def close(self) -> None:
        self._exchange.close()


def grid(hosts: Sequence[Hashable]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank.

    Raises:
        ConfigError: There are fewer than two hosts, or they have unequally many ranks.

    >>> grid(["a", "a", "b", "b"])
    [[0, 1], [2, 3]]
    """
    found: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in found.values()]
    if len(counts) < 2 or len(set(counts)) > 1:
        raise ConfigError(
            f"the hierarchical algorithm needs two hosts or more with equally many ranks, and these have {counts}: "
            'choose "direct", "shared" (one host) or "auto"'
        )
    return list(found.values())


class Hierarchical:
    """A collective in two levels; see the module. ``between``: this rank's shard group, one rank a host."""

    def __init__(self, group: dist.ProcessGroup, inside: Inside, between: Exchange) -> None:
        self.group = group
        self.inside = inside
        self.between = between
        self._worker = Worker("weft-hierarchical")

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        hosts: Sequence[Hashable],
        device: torch.device | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> Hierarchical:
        """Build the groups of both levels; every rank of ``group`` calls it.

        Args:
            group: All ranks.
            hosts: The host of each rank of the group; the names matter only for being alike or not.
            device: Where the tensors will be: CPU ranks reduce through shared memory inside a host, others through
                the group's backend. CPU by default.
            timeout: After which time another rank's silence is an error.

        Raises:
            ConfigError: The hosts have unequally many ranks, or there is one only.
            TransportError: Ranks of one host cannot share memory.
        """
        if len(hosts) != dist.get_world_size(group):
            size = dist.get_world_size(group)
            raise ConfigError(
                f"{len(hosts)} hosts are given for a group of {size} ranks: give the host of each rank"
            )
        rows = grid(hosts)
        rank = group.rank()
        row = next(each for each in rows if rank in each)
        column = [each[row.index(rank)] for each in rows]
        inside: Inside
        device = device or torch.device("cpu")
        if device.type == "cpu":
            inside = HostMemory.connect(group, row, timeout=timeout)
        else:
            inside = HostGroup(subgroup(group, row, device, timeout))
        return cls(group, inside, GroupExchange(subgroup(group, column, device, timeout)))

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, flat: torch.Tensor) -> Job | Queued:
        """Start to replace ``flat`` by its sum over the ranks; see ``Collective``."""
        if not flat.is_cuda:
            check(flat)
        return self._worker.submit(lambda: self.through(flat, self._sum), flat)

    def _sum(self, shard: torch.Tensor) -> None:
        self.between.all_reduce(shard).wait()

    def through(
        self, flat: torch.Tensor, between: Callable[[torch.Tensor], object], scale: float = 1.0
    ) -> None:
        """Sum ``scale`` times ``flat`` inside the host, let ``between`` work on this rank's shard in place, gather
        inside the host.

        Blocking, in the caller's thread; nothing else of this collective is in flight.
        """
        if flat.is_cuda and flat.numel() % self.inside.size:
            padded = flat.new_zeros(-(-flat.numel() // self.inside.size) * self.inside.size)
            padded[: flat.numel()] = flat
            self.through(padded, between, scale)
            flat.copy_(padded[: flat.numel()])
            return
        self.inside.reduce_scatter(flat, scale)
        shard = self.inside.shard(flat)
        if shard.numel():
            between(shard)
        self.inside.all_gather(flat)

    def close(self) -> None:
        """End the thread, the groups and the shared memory; nothing is in flight."""
        self._worker.close()
        self.between.close()
        self.inside.close()
