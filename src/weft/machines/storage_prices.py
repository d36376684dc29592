"""The cost of storage, by prices that somebody gives: weft brings none, since they differ by region and contract.

    bill of a month = GiB kept * gib_month + MiB/s provisioned * mib_s_month
    bill of an epoch = GiB read * gib_read + reads / 1000 * thousand_reads
    bill of a run = months * bill of a month + epochs * bill of an epoch          a month has 730 hours

A price that is not given counts as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.machines.storage_services import DEPLOYMENTS, GIB, SERVICES
from weft.untrusted import shown_text

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
