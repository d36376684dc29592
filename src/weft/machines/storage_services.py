"""The rates of storage services for those who read from them, as their makers' documentation states them.

    EFS           "Amazon EFS performance specifications", "Quotas": 50 KiB/s for each GiB stored (bursting), or what is
                  provisioned; reads are metered at a third, so both give three times that. A client gets 500 MiB/s. The
                  whole: 3 GiB/s, as in small regions (assumed: others allow more)
    S3            "Performance design patterns for Amazon S3": a connection for each 85 to 90 MB/s, at least 5,500 GETs
                  a second for each prefix. AWS's knowledge centre: an instance of EC2 gets up to 100 Gbit/s
    GCS           "Request rate and access distribution guidelines": a bucket begins with 5,000 reads a second, and may
                  double that every 20 minutes. Connections: assumed, as of S3. The whole: assumed, 200 Gbit/s
    Azure Blob    "Scalability and performance targets for Blob storage": an account gives 50 Gbit/s and 20,000 requests
                  a second in every region. Connections: assumed, 60 MiB/s
    FSx           the AWS guide for FSx for Lustre, pages on SSD storage and on throughput capacity

These pages were not read again when this was written: what a bill depends on should be looked up.

Disks inside of hosts are in `weft.machines.catalogue`. What is paid for is in `weft.machines.storage_prices`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
FIGURES = ("host", "connection", "each", "reads", "all")


@dataclass(frozen=True)
class Service:
    """A service; rates in bytes a second, of reading. What has no limit, or is not known to have one, is infinite.

    Attributes:
        name: What it is called.
        unit: What more of it is bought or made: one, and several; nothing if empty.
        host: What one host gets.
        connection: What one connection gives; infinite where nobody chooses their number.
        each: What each unit gives.
        reads: How many reads a second each unit answers.
        all: What the whole gives.
        stores: Whether units are GiB, which the data must fit into.
        assumed: Which of these figures no document states.
    """

    name: str
    unit: tuple[str, str] = ("", "")
    host: float = math.inf
    connection: float = math.inf
    each: float = math.inf
    reads: float = math.inf
    all: float = math.inf
    stores: bool = False
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        faults = [f"{name} is {value}" for name in FIGURES if not (value := getattr(self, name)) > 0]
        if faults:
            raise ConfigError(f'service "{self.name}": {", ".join(faults)}: each must be above 0')

    def changed(self, figures: Mapping[str, float]) -> Service:
        """The service with figures that somebody knows; these are not assumed any more.

        >>> SERVICES["GCS"].changed({"connection": 6e7}).assumed
        ('all',)
        """
        rest = tuple(name for name in self.assumed if name not in figures)
        return replace(self, assumed=rest, **figures)  # type: ignore[arg-type]


_EFS = Service("EFS", host=500 * MIB, all=3 * GIB, assumed=("all",))

SERVICES: Mapping[str, Service] = {
    service.name: service
    for service in (
        replace(_EFS, name="EFS bursting", unit=("GiB stored", "GiB stored"), each=3 * 50 * KIB, stores=True),
        replace(_EFS, name="EFS provisioned", unit=("MiB/s provisioned", "MiB/s provisioned"), each=3 * MIB),
        replace(_EFS, name="EFS elastic"),
        Service("S3", ("prefix", "prefixes"), host=12.5e9, connection=85e6, reads=5500),
        Service(
            "GCS", ("bucket", "buckets"), connection=85e6, reads=5000, all=25e9, assumed=("connection", "all")
        ),
        Service(
            "Azure Blob",
            ("account", "accounts"),
            connection=60 * MIB,
            each=6.25e9,
            reads=20_000,
            assumed=("connection",),
        ),
    )
}
"""By name."""


@dataclass(frozen=True)
class Deployment:
    """A type of file system of FSx for Lustre; rates in MB/s and cache in GiB for each TiB, as AWS counts it.

    1,200 GiB are 1.2 TiB.

    Attributes:
        network: What the network always gives.
        burst: What it gives for a while, from credits.
        disk: What the disks give, reading.
        cache: Memory that keeps files.
        step_gib: Capacities are 1,200, 2,400 and multiples of this.
    """

    network: float
    burst: float
    disk: float
    cache: float
    step_gib: int = 2400


DEPLOYMENTS: Mapping[str, Deployment] = {
    "SCRATCH_2": Deployment(200, 1300, 200, 6.7),
    "PERSISTENT-125": Deployment(320, 1300, 125, 3.4),
    "PERSISTENT-250": Deployment(640, 1300, 250, 6.8),
    "PERSISTENT-500": Deployment(1300, 1300, 500, 13.7),
    "PERSISTENT-1000": Deployment(2600, 2600, 1000, 27.3),
}
"""File systems of FSx for Lustre, by name."""
