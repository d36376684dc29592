"""The file format of machines: one host as JSON, for `--cluster 4xmachine.json`.

    {
      "weft": "machine", "version": 1,
      "name": "my host", "accelerators": 8, "inside": "230GB/s,5.6us", "network": "20GB/s,10us",
      "memory": "1152GiB", "price_per_hour": null,
      "accelerator": {
        "name": "A100-80", "memory": "80GB", "bandwidth": "2039GB/s",
        "peak": {"bf16": 312e12}, "share": {"bf16": 0.83},
        "half_flops": 1.9e9, "memory_share": 0.62, "attention_share": 0.17
      },
      "conduct": {"tensor": 0.0, "data": 0.0, "parameters": 0.5, "ring": 0.32, "crossing_s": 1.1e-4, "spread": 0.0}
    }

What stands for what: `weft.machines.host.Host`, `weft.machines.accelerator.Accelerator`, `weft.machines.host.Conduct`.
An accelerator may be a known name instead of an object. What may be left out: `conduct`, `memory`, `price_per_hour`,
`storage` (what a host's own disks give, "7GB/s"), `storage_size` (what they hold, "8TB"), `services` (figures of
`weft.machines.storage` that are known better: {"GCS": {"connection": "60MB/s"}}), `storage_prices` (those of
`weft.machines.storage`: {"S3": {"gib_month": 0.02}}), `sharing` (a link, of parameters that ranks share), `sums`
and `tokens` (links, of tensors of cut layers: all-reduced, or all-gathered and reduce-scattered along tokens), and an
accelerator's shares: those that are left out count as assumed, as what `assumed` says does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields

from weft.document import Document
from weft.errors import FormatError
from weft.machines.accelerator import DTYPES, Accelerator
from weft.machines.catalogue import host_of
from weft.machines.cluster import parse_cluster
from weft.machines.host import Conduct, Host, Machines
from weft.machines.storage import FIGURES, PRICED, SERVICES, Prices, Service
from weft.topology.cluster import Link
from weft.units import parse_bytes, parse_rate
from weft.untrusted import MOST_RANKS, read_file

VERSION = 1
_HOST = (
    "name",
    "accelerators",
    "inside",
    "network",
    "memory",
    "price_per_hour",
    "accelerator",
    "conduct",
    "storage",
    "storage_size",
    "storage_assumed",
    "services",
    "storage_prices",
    "sharing",
    "sums",
    "tokens",
)
_ACCELERATOR = (
    "name", "memory", "bandwidth", "peak", "share", "half_flops", "memory_share", "attention_share", "assumed",
)  # fmt: skip
_PLAIN = ("half_flops", "memory_share", "attention_share")
_CONDUCT = tuple(one.name for one in fields(Conduct))


def parse_machines(text: str) -> Machines:
    """Machines as :func:`weft.machines.cluster.parse_cluster` takes them; a name that ends in .json is a file's.

    Raises:
        ConfigError: It is neither.
        FormatError: There is no such file, or it describes no host.
    """
    return parse_cluster(text, lambda path: read_file(path, host_from_json))


def host_from_json(text: str) -> Host:
    """A host from its file's text.

    Raises:
        FormatError: It is no such file; the error names the place.
        ConfigError: A number in it cannot be.
    """
    given = Document.parse(text, kind="machine", version=VERSION)
    given.only("weft", "version", *_HOST)
    name = given["name"].text()
    accelerators = given["accelerators"].whole()
    if not 0 <= accelerators <= MOST_RANKS:
        raise FormatError(
            f"{given['accelerators'].path}: expected a whole number from 0 to {MOST_RANKS}, found {accelerators}"
        )
    named = isinstance(given["accelerator"].value, str)
    usual = host_of(given["accelerator"].text(), accelerators) if named else None
    device = usual.accelerator if usual else _accelerator(given["accelerator"])
    conduct = _conduct(given["conduct"]) if "conduct" in given else usual.conduct if usual else Conduct()
    price = given["price_per_hour"] if "price_per_hour" in given else None
    return Host(
        name,
        device,
        accelerators,
        Link.parse(given["inside"].text()),
        Link.parse(given["network"].text()),
        parse_bytes(given["memory"].text()) if "memory" in given else 0,
        None if price is None or price.value is None else price.number(),
        conduct,
        parse_rate(given["storage"].text()) if "storage" in given else 0.0,
        parse_bytes(given["storage_size"].text()) if "storage_size" in given else 0,
        given["storage_assumed"].text() if "storage_assumed" in given else "",
        _link(given, "sharing"),
        _services(given["services"]) if "services" in given else SERVICES,
        _prices(given["storage_prices"]) if "storage_prices" in given else {},
        _link(given, "sums"),
        _link(given, "tokens"),
    )


def host_to_json(host: Host) -> str:
    """The text that `host_from_json` reads.

    >>> host_from_json(host_to_json(host_of("H100"))) == host_of("H100")
    True
    """
    device = host.accelerator
    return json.dumps(
        {
            "weft": "machine",
            "version": VERSION,
            "name": host.name,
            "accelerators": host.accelerators,
            "inside": _link_text(host.inside),
            "network": _link_text(host.network),
            "memory": f"{host.memory_bytes}B",
            "price_per_hour": host.price_per_hour,
            "accelerator": {
                "name": device.name,
                "memory": f"{device.memory_bytes}B",
                "bandwidth": f"{device.bytes_per_s!r}B/s",
                "peak": dict(device.peak),
                "share": dict(device.share),
                "half_flops": device.half_flops,
                "memory_share": device.memory_share,
                "attention_share": device.attention_share,
                **({"assumed": device.assumed} if device.assumed else {}),
            },
            "conduct": asdict(host.conduct),
            **({"storage": f"{host.storage_bytes_per_s!r}B/s"} if host.storage_bytes_per_s else {}),
            **{
                name: _link_text(link)
                for name in ("sharing", "sums", "tokens")
                if (link := getattr(host, name)) is not None
            },
            **({"storage_size": f"{host.storage_bytes}B"} if host.storage_bytes else {}),
            **({"storage_assumed": host.storage_assumed} if host.storage_assumed else {}),
            **({"services": changed} if (changed := _changed_services(host)) else {}),
            **({"storage_prices": host.storage_prices} if host.storage_prices else {}),
        },
        indent=2,
    )


def _link(given: Document, key: str) -> Link | None:
    return Link.parse(given[key].text()) if key in given else None


def _link_text(link: Link) -> str:
    return f"{link.bytes_per_s!r}B/s,{link.latency_s!r}s"


def _accelerator(given: Document) -> Accelerator:
    given.only(*_ACCELERATOR)
    plain = {name: given[name].number() for name in _PLAIN if name in given}
    peak, share = _by_dtype(given["peak"]), _by_dtype(given["share"]) if "share" in given else {}
    lacking = [f"the share of products in {dtype}" for dtype in peak if dtype not in share]
    lacking += [name for name in _PLAIN if name not in plain]
    own = given["assumed"].text() if "assumed" in given else ""
    return Accelerator(
        given["name"].text(),
        parse_bytes(given["memory"].text()),
        parse_rate(given["bandwidth"].text()),
        peak,
        share,
        **plain,
        assumed=", ".join([own, *lacking] if own else lacking),
    )


def _by_dtype(given: Document) -> dict[str, float]:
    given.only(*DTYPES)
    return {dtype: given[dtype].number() for dtype in DTYPES if dtype in given}


def _conduct(given: Document) -> Conduct:
    given.only(*_CONDUCT)
    return Conduct(**{name: given[name].number() for name in _CONDUCT if name in given})


def _services(given: Document) -> Mapping[str, Service]:
    """All services, those that are named with the figures that are given."""
    given.only(*SERVICES)
    found = dict(SERVICES)
    for name in SERVICES:
        if name in given:
            one = given[name]
            one.only(*FIGURES)
            found[name] = found[name].changed(
                {
                    figure: one[figure].number() if figure == "reads" else parse_rate(one[figure].text())
                    for figure in FIGURES
                    if figure in one
                }
            )
    return found


def _prices(given: Document) -> Prices:
    """Prices of storage, by its name and by what is paid for."""
    given.only(*PRICED)
    found: dict[str, dict[str, float]] = {}
    for name, paid in PRICED.items():
        if name in given:
            given[name].only(*paid)
            found[name] = {one: given[name][one].number() for one in paid if one in given[name]}
    return found


def _changed_services(host: Host) -> dict[str, dict[str, object]]:
    """The figures of a host's services that differ from the usual ones."""
    changed: dict[str, dict[str, object]] = {}
    for name, service in host.services.items():
        for figure in FIGURES:
            value = getattr(service, figure)
            known = figure in SERVICES[name].assumed and figure not in service.assumed
            if value != getattr(SERVICES[name], figure) or known:
                changed.setdefault(name, {})[figure] = value if figure == "reads" else f"{value!r}B/s"
    return changed
