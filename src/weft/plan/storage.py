"""The rate that a job needs of its storage, the smallest FSx for Lustre file system that gives it, and services.

need = bytes read of a step / its time        in the first epoch all of it comes from the storage's disks
later epochs                                  what lies in the file system's own cache comes over its network instead,
                                              and what fits into the hosts' memory is not read again at all

Of a service it is the fewest units that serve, and connections:

    need of a host = need / hosts               at most what a host gets, and what its network cards carry
    connections of a host = need of a host / rate of a connection
    units = need / rate of a unit, or need / (bytes of a read x reads a second of a unit) if that is more

Read again in each epoch: services have no cache that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.machines.storage import DEPLOYMENTS, GIB, Bill, Prices, Service, bill

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


READ_BYTES = 8 * 10**6
"""Of one request: S3's guide calls ranges of 8 to 16 MB typical."""


@dataclass(frozen=True)
class Serving:
    """The part of a service that a job gets.

    Attributes:
        name: The service.
        host_bytes_per_s: The most that one host gets.
        all_bytes_per_s: The most that all hosts get together.
        units: The fewest that serve; 0 if there is nothing to count, or if it cannot serve.
        unit: What they are: one, and several.
        connections: Of each host; 0 if nobody chooses them.
        lacks: Who does not get enough: "a host" or "all hosts"; empty if it serves.
        assumed: Which of the service's figures no document states.
        bill: What that costs, if a price is known and it serves.
    """

    name: str
    host_bytes_per_s: float
    all_bytes_per_s: float
    units: int
    unit: tuple[str, str]
    connections: int
    lacks: str
    assumed: tuple[str, ...]
    bill: Bill | None = None


def serving(
    service: Service,
    need_bytes_per_s: float,
    hosts: int = 1,
    *,
    data_bytes: float = 0.0,
    read_bytes: float = READ_BYTES,
    network_bytes_per_s: float = math.inf,
    prices: Prices | None = None,
    run_s: float | None = None,
) -> Serving:
    """The part of a service that serves `hosts` that read `need_bytes_per_s` together, `read_bytes` with each request.

    Args:
        service: Which one.
        need_bytes_per_s: Bytes a second of all hosts.
        hosts: How many read at once.
        data_bytes: What is stored.
        read_bytes: Of one request.
        network_bytes_per_s: What the network cards of one host carry.
        prices: Of storage, those that are known.
        run_s: How long the whole training takes, if that is known.

    Raises:
        ConfigError: One of these is nothing.

    >>> from weft.machines.storage import SERVICES
    >>> found = serving(SERVICES["S3"], 10e9, hosts=4)
    >>> found.connections, found.units, found.unit
    (30, 1, ('prefix', 'prefixes'))
    >>> serving(SERVICES["EFS bursting"], 300 * 2**20).units
    2048
    """
    if need_bytes_per_s <= 0 or hosts < 1 or read_bytes <= 0:
        raise ConfigError(
            f"{hosts} hosts need {need_bytes_per_s:g} bytes a second in reads of {read_bytes:g} bytes: all must be "
            "above 0"
        )
    host = min(service.host, network_bytes_per_s)
    most = min(service.all, hosts * host)
    one = need_bytes_per_s / hosts
    lacks = "a host" if one > host else "all hosts" if need_bytes_per_s > most else ""
    units = connections = 0
    if not lacks and service.unit[0]:
        of_each = min(service.each, service.reads * read_bytes)
        units = max(1, math.ceil(need_bytes_per_s / of_each))
        units = max(units, math.ceil(data_bytes / GIB)) if service.stores else units
    if not lacks and service.connection < math.inf:
        connections = math.ceil(one / service.connection)
    costs = None if lacks or not prices else bill(
        prices, service.name, kept_gib=units if service.stores else data_bytes / GIB, read_bytes=data_bytes,
        reads=data_bytes / read_bytes, provisioned=units, run_s=run_s, epoch_s=data_bytes / need_bytes_per_s,
    )  # fmt: skip
    return Serving(service.name, host, most, units, service.unit, connections, lacks, service.assumed, costs)
