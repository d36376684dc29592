"""Tables of what storage must give, and of what does: the part of `weft plan --data` and of `weft storage` that both
print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from weft.machines.storage import Bill, Prices
from weft.plan.parallelism.answer import Answer
from weft.plan.storage import Given, Serving, need_bytes_per_s
from weft.report.run.labels import Table
from weft.units import format_bytes, format_seconds

WORDS = {
    "host": "what a host gets",
    "connection": "a connection",
    "each": "a unit",
    "reads": "reads a second",
    "all": "the whole",
}


def storage(found: Answer) -> tuple[str, list[Table]]:
    """The rate that the storage must give, and the file systems and services that do."""
    asked = found.asked
    assert asked.data_bytes is not None and asked.epoch_s is not None
    need = need_bytes_per_s(asked.data_bytes, asked.epoch_s)
    hosts = asked.machines.hosts
    memory = asked.machines.host.memory_bytes * hosts
    if not memory:
        cached = "whether it fits into the hosts' memory is not known: name an instance type, or write a machine file"
    elif memory > 2 * asked.data_bytes:
        cached = "all of it fits into the hosts' memory: later epochs need not read it"
    else:
        cached = "it does not fit into half of the hosts' memory: later epochs read it again"
    rows = []
    for first, later in found.storage:
        of_first, of_later = (bill_cells(each.bill) for each in (first, later))
        rows.append(
            (
                first.name, f"{first.capacity_gib:,} GiB", of_first[0], of_first[2], f"{later.capacity_gib:,} GiB",
                of_later[0], of_later[2], format_bytes(later.cache_bytes),
            )
        )  # fmt: skip
    at_hand = [_at_hand(one, hosts, asked.data_bytes) for one in found.given]
    first_line = (
        f"Storage: {need / 1e9:.3g} GB/s in all, {need / hosts / 1e9:.3g} GB/s for each host; {cached}"
    )
    headers = (
        "FSx for Lustre", "first epoch, too", "a month", "the run", "later epochs", "a month", "the run",
        "of them in its cache",
    )  # fmt: skip
    prices = counted(asked.machines.host.storage_prices)
    return (
        "\n".join([first_line, *at_hand, *services_assumed(found.services), *prices]),
        [said(Table("", headers, rows, "<>>>>>>>")), services_table(found.services)],
    )


def _at_hand(one: Given, hosts: int, data_bytes: float) -> str:
    """A rate that is known, in a line."""
    serves = "enough" if one.serves else "too little"
    holds = ""
    if one.host_bytes:
        room = "not even a host's share of the data fits there"
        if data_bytes <= hosts * one.host_bytes:
            room = "a host's share of the data fits there"
        if data_bytes <= one.host_bytes:
            room = "all of the data fits on each host"
        holds = f"; {room}"
    source = f"with the {one.assumed} assumed" if one.assumed else "as was given"
    return (
        f"{one.name}: {rate_text(one.bytes_per_s)} {source}, {serves}; an epoch takes "
        f"{format_seconds(one.epoch_s)} to read{holds}"
    )


def services_table(found: Sequence[Serving]) -> Table:
    """A table of the services, each with the least of it that serves."""
    headers = (
        "service", "a host gets up to", "all hosts", "least that serves", "connections a host", "a month", "an epoch",
        "the run",
    )  # fmt: skip
    rows = [
        (
            one.name,
            rate_text(one.host_bytes_per_s),
            rate_text(one.all_bytes_per_s),
            _least(one),
            str(one.connections or ""),
            *bill_cells(one.bill),
        )
        for one in found
    ]
    return said(Table("", headers, rows, "<>><>>>>"), always=5)


def said(one: Table, always: int = 2) -> Table:
    """A table without the columns that are empty; the first ones stay."""
    kept = [at for at in range(len(one.headers)) if at < always or any(row[at] for row in one.rows)]
    rows = [tuple(row[at] for at in kept) for row in one.rows]
    return Table(
        one.caption, tuple(one.headers[at] for at in kept), rows, "".join(one.align[at] for at in kept)
    )


def bill_cells(costs: Bill | None) -> tuple[str, str, str]:
    """The cells of a month's, an epoch's and the run's cost; empty where unknown, and where reading costs nothing.

    >>> bill_cells(Bill(1234.0, 0.0)), bill_cells(None)
    (('1,234', '', ''), ('', '', ''))
    """
    if costs is None:
        return "", "", ""
    epoch = _money(costs.epoch) if costs.epoch else ""
    return _money(costs.month), epoch, "" if costs.run is None else _money(costs.run)


def _money(amount: float) -> str:
    """An amount, with as many digits as say something.

    >>> _money(12345.6), _money(2.5), _money(0.0123)
    ('12,346', '2.5', '0.012')
    """
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}" if amount >= 1 else f"{amount:.2g}"


def counted(prices: Prices) -> list[str]:
    """The prices that were given, in a line if there are any: all else counts as nothing."""
    texts = [
        f"{name} ({', '.join(f'{paid} {price:g}' for paid, price in own.items())})"
        for name, own in prices.items()
        if own
    ]
    return [f"prices count what was given, and nothing else: {'; '.join(texts)}"] if texts else []


def add_prices(parser: Any) -> None:
    """The option for prices of storage."""
    parser.add_argument(
        "--storage-price", action="append", default=[], metavar="NAME:FOR=P",
        help="what storage costs, in any currency: S3:gib_month=0.02; repeat it",
    )  # fmt: skip


def _least(one: Serving) -> str:
    if one.lacks:
        return f"too little for {one.lacks}"
    if not one.units:
        return "serves"
    return f"{one.units:,} {one.unit[0 if one.units == 1 else 1]}"


def services_assumed(found: Sequence[Serving]) -> list[str]:
    """The figures that no document states, in a line if there are any."""
    texts = [
        f"{one.name} ({' and '.join(WORDS[name] for name in one.assumed)})" for one in found if one.assumed
    ]
    return [f"assumed, not published: {', '.join(texts)}"] if texts else []


def services_json(one: Serving) -> dict[str, Any]:
    """The same for programs; what has no limit that is known is null."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value
        for name, value in asdict(one).items()
    }


def rate_text(bytes_per_s: float) -> str:
    """A rate in the units of data sheets.

    >>> rate_text(2.5e9), rate_text(3e7)
    ('2.5 GB/s', '30 MB/s')
    """
    if math.isinf(bytes_per_s):
        return "no limit known"
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.3g} MB/s"
