"""The part of a storage service that a job needs: the fewest units that serve, and connections.

    need of a host = need / hosts               at most what a host gets, and what its network cards carry
    connections of a host = need of a host / rate of a connection
    units = need / rate of a unit, or need / (bytes of a read x reads a second of a unit) if that is more

Read again in each epoch: services have no cache that counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.machines.storage_prices import Bill, Prices, bill
from weft.machines.storage_services import GIB, Service

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

    >>> from weft.machines.storage_services import SERVICES
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
