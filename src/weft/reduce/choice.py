"""The choice of an all-reduce: by name, or measured at the start on the ranks and links that are there."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import ConfigError, TransportError
from weft.reduce.channels import Channels
from weft.reduce.collective import Collective, Direct, Work
from weft.reduce.exchange import gather_rows
from weft.reduce.hierarchical import Hierarchical
from weft.reduce.shared import TIMEOUT, SharedMemory
from weft.transport import segment

ALGORITHMS = ("auto", "direct", "shared", "hierarchical")
SIZES_BYTES = (64 << 10, 1 << 20, 8 << 20)
CHANNELS = 4
"""Enough to keep the wire busy while pieces are summed inside hosts, compressed and handed back; see `benchmarks`."""
_REPETITIONS = 3


def hosts_of(group: dist.ProcessGroup, device: torch.device | None = None) -> list[int]:
    """A number for the host of each rank of a group; alike where ranks can share memory. Every rank calls it."""
    return gather_rows(torch.tensor([segment.host_number()], device=device), group).view(-1).tolist()


class BySize:
    """Several collectives over the same ranks; each sum goes to the one that is fastest for its size.

    Args:
        table: (most bytes, collective) in ascending order; the last one also takes what is larger.
    """

    def __init__(self, group: dist.ProcessGroup, table: Sequence[tuple[int, Collective]]) -> None:
        self.group = group
        self.table = tuple(table)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def find(self, size_bytes: int) -> Collective:
        """The collective for a tensor of so many bytes."""
        return next((each for most, each in self.table if size_bytes <= most), self.table[-1][1])

    def all_reduce(self, flat: torch.Tensor) -> Work:
        """Start to replace ``flat`` by its sum over the ranks; see ``Collective``."""
        return self.find(flat.numel() * flat.itemsize).all_reduce(flat)

    def close(self) -> None:
        """Close each collective."""
        for each in {id(each): each for _, each in self.table}.values():
            each.close()


def choose(
    group: dist.ProcessGroup,
    algorithm: str = "auto",
    hosts: Sequence[Hashable] | None = None,
    device: torch.device | None = None,
    compressed: bool = False,
    timeout: timedelta = TIMEOUT,
) -> Collective:
    """The collective that all-reduces gradients over a group. Every rank of the group calls it alike.

    Args:
        group: The ranks; the group is used for sums by nobody else from now on.
        algorithm: ``"direct"`` (the backend's own), ``"shared"`` (shared memory: CPU, one host), ``"hierarchical"``
            (two hosts or more with equally many ranks) or ``"auto"``: what fits is measured, for three sizes.
        hosts: The host of each rank; found out if None.
        device: Where the gradients are; CPU by default.
        compressed: Whether a compression will run over it: then ``"auto"`` is hierarchical wherever that fits and a
            host has several ranks, since only what goes between hosts is worth compressing.
        timeout: After which time another rank's silence is an error.

    Raises:
        ConfigError: There is no such algorithm, or it does not fit the hosts or the device.
        TransportError: Ranks that are said to share a host cannot share memory.
    """
    device = device or torch.device("cpu")
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"there is no algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
    if algorithm == "direct" or dist.get_world_size(group) == 1:
        return Direct(group)
    found = list(hosts) if hosts is not None else hosts_of(group, device if device.type == "cuda" else None)
    if algorithm == "shared":
        _check_shared(found, device)
        return SharedMemory.connect(group, timeout)
    if algorithm == "hierarchical":
        return _hierarchical(group, found, device, timeout)
    fitting = _fitting(group, found, device, timeout)
    if compressed or len(fitting) == 1:
        return fitting[-1]
    return _fastest(group, fitting, device)


def _hierarchical(
    group: dist.ProcessGroup, hosts: Sequence[Hashable], device: torch.device, timeout: timedelta
) -> Collective:
    """On GPUs one channel: kernels of several NCCL groups at once may wait for each other's place on the device."""
    count = CHANNELS if device.type == "cpu" else 1
    channels = [Hierarchical.connect(group, hosts, device, timeout) for _ in range(count)]
    return Channels(group, channels) if count > 1 else channels[0]


def _check_shared(hosts: Sequence[Hashable], device: torch.device) -> None:
    faults = []
    if len(set(hosts)) > 1:
        faults.append(f"the ranks are on {len(set(hosts))} hosts")
    if device.type != "cpu":
        faults.append(f"the gradients are on {device}")
    if not segment.available():
        faults.append("this is not Linux on x86-64")
    if faults:
        raise ConfigError(
            f'the algorithm "shared" adds up in the memory of one host, but {" and ".join(faults)}: choose '
            '"direct", "hierarchical" or "auto"'
        )


def _fitting(
    group: dist.ProcessGroup, hosts: Sequence[Hashable], device: torch.device, timeout: timedelta
) -> list[Collective]:
    """Direct, and the algorithm that fits the hosts if there is one."""
    direct = Direct(group)
    counts = {hosts.count(host) for host in hosts}
    if device.type == "cpu" and not segment.available():
        return [direct]
    try:
        if len(set(hosts)) == 1:
            return [direct, SharedMemory.connect(group, timeout)] if device.type == "cpu" else [direct]
        if len(counts) == 1 and counts != {1}:
            return [direct, _hierarchical(group, hosts, device, timeout)]
    except TransportError:  # raised by all ranks together
        pass
    return [direct]


def _fastest(group: dist.ProcessGroup, several: list[Collective], device: torch.device) -> Collective:
    """Measure each collective for each size; all ranks go by the slowest rank's time, so they choose alike."""
    times = torch.empty(len(SIZES_BYTES), len(several), dtype=torch.float64)
    for row, size_bytes in enumerate(SIZES_BYTES):
        flat = torch.zeros(size_bytes // 4, device=device)
        for column, each in enumerate(several):
            times[row, column] = min(_time_s(each, flat) for _ in range(_REPETITIONS))
    times = times.to(device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    best = times.argmin(dim=1).tolist()
    table = [(size_bytes, several[index]) for size_bytes, index in zip(SIZES_BYTES, best, strict=True)]
    for index, each in enumerate(several):
        if index not in best:
            each.close()
    return table[0][1] if len(set(best)) == 1 else BySize(group, table)


def _time_s(collective: Collective, flat: torch.Tensor) -> float:
    start = time.perf_counter()
    collective.all_reduce(flat).wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return time.perf_counter() - start
