"""The rate that a job needs of its storage, and the smallest FSx for Lustre file system that gives it.

need = bytes read of a step / its time        in the first epoch all of it comes from the storage's disks
later epochs                                  what lies in the file system's own cache comes over its network instead,
                                              and what fits into the hosts' memory is not read again at all
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError
from weft.machines.storage_prices import Bill
from weft.machines.storage_services import DEPLOYMENTS, GIB

MB = 10**6


@dataclass(frozen=True)
class FileSystem:
    """A file system of a size, and what it gives.

    Attributes:
        name: Its deployment.
        capacity_gib: Its size.
        first_bytes_per_s: In the first epoch, from disks.
        later_s: How long a later epoch takes to read, with its cache.
        cache_bytes: What that holds.
        bill: What it costs, if a price is known.
    """

    name: str
    capacity_gib: int
    first_bytes_per_s: float
    later_s: float
    cache_bytes: float
    bill: Bill | None = None


@dataclass(frozen=True)
class Given:
    """Storage of a known rate: what somebody gave, or disks of the hosts.

    Attributes:
        name: Which it is.
        bytes_per_s: What all hosts together get.
        epoch_s: How long an epoch takes to read.
        serves: Whether that is in time.
        assumed: What of it no document states, in words.
        host_bytes: What one host's disks hold; 0 if that is not known.
    """

    name: str
    bytes_per_s: float
    epoch_s: float
    serves: bool
    assumed: str = ""
    host_bytes: int = 0


def given(
    name: str,
    bytes_per_s: float,
    data_bytes: float,
    epoch_s: float,
    *,
    assumed: str = "",
    host_bytes: int = 0,
) -> Given:
    """The storage of a rate, and whether an epoch ends in time with it.

    >>> found = given("--storage-rate", 2e9, 100e9, 30.0)
    >>> found.epoch_s, found.serves
    (50.0, False)
    """
    takes_s = data_bytes / bytes_per_s
    return Given(name, bytes_per_s, takes_s, takes_s <= epoch_s, assumed, host_bytes)


def need_bytes_per_s(data_bytes: float, epoch_s: float) -> float:
    """Bytes a second that all hosts together read.

    >>> round(need_bytes_per_s(100e9, 30.0) / 1e9, 2)
    3.33
    """
    if data_bytes <= 0 or epoch_s <= 0:
        raise ConfigError(
            f"the data are {data_bytes:g} bytes and an epoch takes {epoch_s:g} s: both must be above 0"
        )
    return data_bytes / epoch_s


def file_system(name: str, capacity_gib: int, data_bytes: float) -> FileSystem:
    """The file system of a size, for data of a size.

    >>> file_system("SCRATCH_2", 1200, 100e9).first_bytes_per_s / 1e6
    240.0
    """
    kind, tib = DEPLOYMENTS[name], capacity_gib / 1000
    disk = kind.disk * tib * MB
    cache = min(data_bytes, kind.cache * tib * GIB)
    return FileSystem(
        name, capacity_gib, disk, (data_bytes - cache) / disk + cache / (kind.burst * tib * MB), cache
    )


def smallest(name: str, data_bytes: float, epoch_s: float, *, first: bool = False) -> FileSystem:
    """The smallest file system that holds the data and gives an epoch in time.

    Args:
        name: One of `DEPLOYMENTS`.
        data_bytes: What an epoch reads.
        epoch_s: How long it may take to read.
        first: Whether the first epoch must be in time, too; else the later ones.

    The example of AWS and SageMaker's guides, 100 GB in 30 s: 3.3 GB/s from disks, or 2.4 GB/s with 67 GB in the cache.

    >>> smallest("SCRATCH_2", 100e9, 30.0).capacity_gib, smallest("SCRATCH_2", 100e9, 30.0, first=True).capacity_gib
    (9600, 16800)
    """
    need_bytes_per_s(data_bytes, epoch_s)
    step = DEPLOYMENTS[name].step_gib

    def serves(capacity: int) -> bool:
        found = file_system(name, capacity, data_bytes)
        took = data_bytes / found.first_bytes_per_s if first else found.later_s
        return took <= epoch_s and capacity * GIB >= data_bytes

    if serves(1200):
        return file_system(name, 1200, data_bytes)
    above = 1
    while not serves(above * step):
        above *= 2
    below = above // 2
    while above - below > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if serves(middle * step) else (above, middle)
    return file_system(name, above * step, data_bytes)
