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

Disks inside of hosts are in `weft.machines.catalogue`.

What storage costs follows from prices that somebody gives: weft brings none, since they differ by region and contract.

    bill of a month = GiB kept * gib_month + MiB/s provisioned * mib_s_month
    bill of an epoch = GiB read * gib_read + reads / 1000 * thousand_reads
    bill of a run = months * bill of a month + epochs * bill of an epoch          a month has 730 hours

A price that is not given counts as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.untrusted import shown_text

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


MONTH_S = 730 * 3600.0
MOST = 1e12
"""No price is larger: sums of prices are to be numbers."""

Prices = Mapping[str, Mapping[str, float]]
"""By name of the storage, then by what is paid for: a key of `PAID`."""

PAID: Mapping[str, str] = {
    "gib_month": "a GiB kept for a month",
    "mib_s_month": "a MiB/s provisioned for a month",
    "gib_read": "a GiB read",
    "thousand_reads": "1,000 requests that read",
}
_EACH: Mapping[str, tuple[str, ...]] = {
    "EFS bursting": ("gib_month",),
    "EFS provisioned": ("gib_month", "mib_s_month"),
    "EFS elastic": ("gib_month", "gib_read"),
}
_STORES = ("gib_month", "gib_read", "thousand_reads")
PRICED: Mapping[str, tuple[str, ...]] = {
    **{name: _EACH.get(name, _STORES) for name in SERVICES},
    **dict.fromkeys(DEPLOYMENTS, ("gib_month",)),
}
"""What is paid for, by name of the storage: services, and deployment types of FSx for Lustre."""


@dataclass(frozen=True)
class Bill:
    """The cost of storage, in the currency of its prices.

    Attributes:
        month: For a month that it is there.
        epoch: For reading all data once.
        run: For the whole training; None if nobody said how long that is.
    """

    month: float
    epoch: float
    run: float | None = None


def check_prices(prices: Prices) -> None:
    """Refuse prices of what is not known, and prices that cannot be.

    Raises:
        ConfigError: There are such; all are named.
    """
    faults = []
    for name, own in prices.items():
        if name not in PRICED:
            faults.append(f'"{shown_text(name)}" is no storage that is known; known are {", ".join(PRICED)}')
            continue
        for paid, price in own.items():
            if paid not in PRICED[name]:
                known = ", ".join(f"{one} ({PAID[one]})" for one in PRICED[name])
                faults.append(f'{name} has no price by "{shown_text(paid)}"; it has {known}')
            elif not 0 <= price <= MOST:
                faults.append(f"{paid} of {name} is {price}, it must be a number from 0 to {MOST:,.0f}")
    if faults:
        raise ConfigError(f"prices of storage: {'; '.join(faults)}")


def parse_price(text: str) -> tuple[str, str, float]:
    """Storage, what is paid for, and the price, of `NAME:PAID=PRICE`.

    >>> parse_price("EFS elastic:gib_read=0.03")
    ('EFS elastic', 'gib_read', 0.03)
    """
    named, equals, price = text.rpartition("=")
    name, colon, paid = named.partition(":")
    try:
        found = float(price)
    except ValueError:
        equals = ""
    if not equals or not colon:
        raise ConfigError(
            f"'{shown_text(text)}' is no price of storage: write name, what is paid for and price, as in "
            "'S3:gib_month=0.02'"
        )
    return name, paid, found


def with_prices(prices: Prices, texts: list[str]) -> Prices:
    """Prices with those of `NAME:PAID=PRICE`, which win.

    >>> with_prices({"S3": {"gib_month": 0.02}}, ["S3:thousand_reads=0.5", "GCS:gib_month=0.03"])
    {'S3': {'gib_month': 0.02, 'thousand_reads': 0.5}, 'GCS': {'gib_month': 0.03}}
    """
    found = {name: dict(own) for name, own in prices.items()}
    for name, paid, price in map(parse_price, texts):
        found.setdefault(name, {})[paid] = price
    check_prices(found)
    return found


def bill(
    prices: Prices,
    name: str,
    *,
    kept_gib: float,
    read_bytes: float,
    reads: float,
    provisioned: float = 0.0,
    run_s: float | None = None,
    epoch_s: float | None = None,
) -> Bill | None:
    """The cost of storage; None if it has no price.

    Args:
        prices: Those that are known.
        name: Which storage.
        kept_gib: GiB that are paid for.
        read_bytes: Of an epoch.
        reads: Requests of an epoch.
        provisioned: MiB/s that are paid for.
        run_s: How long the whole training takes, if that is known.
        epoch_s: How long an epoch takes; one follows the other.

    >>> prices = {"S3": {"gib_month": 0.02, "thousand_reads": 0.5}}
    >>> bill(prices, "S3", kept_gib=100, read_bytes=0, reads=4000, run_s=MONTH_S / 2, epoch_s=MONTH_S / 20)
    Bill(month=2.0, epoch=2.0, run=21.0)
    """
    own = prices.get(name)
    if not own:
        return None
    month = kept_gib * own.get("gib_month", 0.0) + provisioned * own.get("mib_s_month", 0.0)
    epoch = read_bytes / GIB * own.get("gib_read", 0.0) + reads / 1000 * own.get("thousand_reads", 0.0)
    run = None if run_s is None or epoch_s is None else month * run_s / MONTH_S + epoch * run_s / epoch_s
    return Bill(month, epoch, run)
