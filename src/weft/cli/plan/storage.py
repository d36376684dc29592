"""`weft storage`: what a file system gives a loader's readers, and whether that is enough."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from weft.cli.options import count
from weft.cli.plan.storage_tables import (
    add_prices,
    bill_cells,
    counted,
    rate_text,
    said,
    services_assumed,
    services_json,
    services_table,
)
from weft.errors import UsageError
from weft.machines.storage import DEPLOYMENTS, SERVICES, Prices, bill, with_prices
from weft.measure import storage
from weft.measure.files import Held, files_of, own_file
from weft.measure.storage import CHUNK, COLD, WARM, Rate, ladder, measure_all
from weft.plan.storage import READ_BYTES, Serving, need_bytes_per_s, serving, smallest
from weft.report.run.labels import Table
from weft.report.text import table
from weft.units import format_bytes, parse_bytes, parse_rate, parse_seconds
from weft.untrusted import shown_path

_EXAMPLES = """\
examples:
  weft storage /data --need 3GB/s
  weft storage /data --data 100GB --epoch 30s --hosts 4 --drop-cache
  weft storage /data/tokens.bin --record 16KiB --readers 8
  weft storage /scratch --write 4GB --drop-cache
"""
SHORT_S = 0.3
ENOUGH = 1.05
"""More readers that give less than this much more are not worth their processes."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "storage",
        help="what a file system gives a loader, and whether it is enough",
        description="Reads the files of a data set for some seconds, the way a loader does, with one reader, two and "
        "so on. Says what that gives, and what to change or buy if it is too little. It writes nothing but what "
        "--write makes and removes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the folder of the data, or one file")
    parser.add_argument("--need", metavar="RATE", help="what all hosts together need, for example 3GB/s")
    parser.add_argument("--data", metavar="SIZE", help="or: what an epoch reads, for example 100GB, with")
    parser.add_argument("--epoch", metavar="TIME", help="how long it may take, for example 30s")
    parser.add_argument(
        "--hosts", type=count, default=1, metavar="N", help="hosts that read at once (default: 1)"
    )
    parser.add_argument(
        "--readers", type=count, metavar="N", help="most readers at once (default: 16, or twice the cores if less)"
    )  # fmt: skip
    parser.add_argument("--record", metavar="SIZE", help="read records of this size, not whole files")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="of each measurement (default: 2)"
    )
    parser.add_argument(
        "--drop-cache", action="store_true", help="have the system forget these files before each measurement"
    )
    parser.add_argument("--write", metavar="SIZE", help="measure a file that is written there, and removed")
    parser.add_argument("--fio", action="store_true", help="run fio beside, if it is installed")
    add_prices(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(handler=main)


class Measured(NamedTuple):
    """All that was found, and what it is held against.

    Attributes:
        path: What was measured.
        files: Its files.
        rates: By measurement.
        fio: What fio says.
        need: Bytes a second that this host needs; None if nobody said.
        cores: Of this host.
        memory: Bytes of this host's memory.
        hosts: How many read at once.
        record: Bytes of a read, if not whole files.
        prices: Of storage, those that are known.
    """

    path: str
    files: Sequence[Held]
    rates: Sequence[Rate]
    fio: Sequence[storage.FioRate]
    need: float | None
    cores: int
    memory: int
    hosts: int = 1
    record: int = 0
    prices: Prices = MappingProxyType({})

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(held.size for held in self.files)

    @property
    def loader(self) -> list[Rate]:
        """By the loader's pattern, as the first epoch reads."""
        return list(self.rates[1:-1])

    @property
    def best(self) -> Rate:
        """The fewest readers that give about as much as any number of them."""
        most = max(rate.bytes_per_s for rate in self.loader)
        return next(rate for rate in self.loader if rate.bytes_per_s * ENOUGH >= most)

    @property
    def serves(self) -> bool | None:
        """True if the storage is fast enough; None if nobody said what is needed."""
        return None if self.need is None else self.best.bytes_per_s >= self.need


def main(options: argparse.Namespace) -> int:
    found = measured(options)
    print(json.dumps(as_json(found), indent=2) if options.json else as_text(found))
    return 1 if found.serves is False else 0


def measured(options: argparse.Namespace) -> Measured:
    need, cores = _need(options), os.cpu_count() or 1
    prices = with_prices({}, options.storage_price)
    most = min(16, 2 * cores) if options.readers is None else options.readers
    record = parse_bytes(options.record) if options.record else 0
    if not 0 < options.seconds <= 3600 or most < 1 or (options.record and record < 1):
        raise UsageError("--seconds must be above 0 and at most 3600, --readers and --record at least 1")
    path = Path(options.path)
    made = own_file(path, parse_bytes(options.write)) if options.write else nullcontext(None)
    with made as own:
        files = own or files_of(path)
        rates = list(measure_all(files, ladder(most), options.seconds, record, options.drop_cache))
        beside: list[storage.FioRate] = []
        if options.fio:
            if not storage.has_fio():
                raise UsageError("fio is not installed: install it (apt install fio), or leave --fio out")
            block = record or min(CHUNK, max(held.size for held in files))
            for pattern, readers in (("in a row", 1), (rates[1].pattern, rates[-1].readers)):
                one = storage.measure_by_fio(files, pattern, readers, options.seconds, block)
                beside += [one] if one is not None else []
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Measured(str(path), files, rates, beside, need, cores, memory_bytes, options.hosts, record, prices)


def _need(options: argparse.Namespace) -> float | None:
    """Bytes a second that one host needs."""
    if (options.data is None) != (options.epoch is None):
        raise UsageError("--data and --epoch belong together: --data 100GB --epoch 30s")
    if options.data is not None and options.need is not None:
        raise UsageError("--need says what --data and --epoch say: give one of them")
    if options.hosts < 1:
        raise UsageError(f"--hosts is {options.hosts}, it must be at least 1")
    if options.data is not None:
        need = need_bytes_per_s(parse_bytes(options.data), parse_seconds(options.epoch))
    elif options.need is not None:
        need = parse_rate(options.need)
    else:
        return None
    return need / options.hosts


def advice(found: Measured) -> list[str]:
    """Advice on what to change or to buy, the cheapest first."""
    lines, best, loader = [], found.best, found.loader
    row, warm = found.rates[0], found.rates[-1]
    if best.seconds < SHORT_S:
        lines.append(
            f"reading ended after {best.seconds:.2g} s, which is too short for figures to trust: measure more files, "
            "or --write 4GB"
        )
    if not all(rate.state == COLD for rate in loader):
        lines.append(
            "files were in the system's memory while this was measured, so a first epoch is slower: --drop-cache has "
            "them forgotten before, --write 4GB measures a file of its own"
        )
    rises = len(loader) > 1 and best is loader[-1]
    lines.append(
        f"it gave most to the most readers, {best.readers}: it may give more, try --readers {2 * best.readers}"
        if rises
        else f"num_workers={best.readers} is enough to read, all loaders of a host together: more readers gave less "
        "than 5 % more"
    )
    if found.need is None or found.serves:
        return lines
    mean = found.size / len(found.files)
    if best.pattern == "whole files" and mean < 1 << 20 and row.bytes_per_s > 1.5 * loader[0].bytes_per_s:
        lines.append(
            f"the files have {format_bytes(mean)} in the mean, and reading in a row is "
            f"{row.bytes_per_s / loader[0].bytes_per_s:.1f} times as fast: pack them into shards of 100 MB "
            "(WebDataset), and shuffle within"
        )
    if found.size < 0.8 * found.memory and warm.state == WARM and warm.bytes_per_s >= found.need:
        lines.append(
            f"all of it fits into this host's memory ({format_bytes(found.memory)}), which gives "
            f"{rate_text(warm.bytes_per_s)}: from the second epoch on it serves; read the files once before training"
        )
    lines.append(
        f"copy the data to a disk of the host before training, if it gives {rate_text(found.need)}: measure it with "
        "--write"
    )
    return lines


def as_text(found: Measured) -> str:
    """The answer for a terminal."""
    parts = [
        f"{shown_path(found.path)}: {len(found.files):,} files, {format_bytes(found.size)}",
        table(
            ["reads", "readers", "memory", "rate", "reads/s", "99 % within"],
            [
                [
                    rate.pattern, rate.readers, rate.state, rate_text(rate.bytes_per_s), f"{rate.reads_per_s:,.0f}",
                    f"{rate.slowest_s * 1e3:,.2f} ms",
                ]
                for rate in found.rates
            ],
            "<><>>>",
        ),
    ]  # fmt: skip
    if found.fio:
        parts.append(
            table(
                ["fio", "readers", "rate"],
                [[one.pattern, one.readers, rate_text(one.bytes_per_s)] for one in found.fio],
                "<>>",
            )
        )
    parts += [_verdict(found), "\n".join(f"* {line}" for line in advice(found))]
    if found.serves is False and found.need is not None:
        parts += [_file_systems(found), *_services(found)]
    return "\n\n".join(parts)


def _verdict(found: Measured) -> str:
    best = found.best
    readers = "one reader" if best.readers == 1 else f"{best.readers} readers"
    gives = f"It gives {rate_text(best.bytes_per_s)} to {readers} of this host"
    if found.need is None:
        return f"{gives}."
    if found.serves:
        return f"{gives}, which needs {rate_text(found.need)}: enough."
    return f"{gives}, which needs {rate_text(found.need)}: {best.bytes_per_s / found.need:.0%} of it."


def _file_systems(found: Measured) -> str:
    """The smallest FSx for Lustre file systems that would serve this host's need in the first epoch."""
    assert found.need is not None
    epoch_s = found.size / found.need
    rows = []
    for name in DEPLOYMENTS:
        size = smallest(name, found.size, epoch_s, first=True).capacity_gib
        costs = bill(found.prices, name, kept_gib=size, read_bytes=0.0, reads=0.0)
        rows.append((name, f"{size:,} GiB", *bill_cells(costs)[:1]))
    one = said(Table("", ("FSx for Lustre, for each host that reads", "smallest", "a month"), rows, "<>>"))
    return table(one.headers, one.rows, one.align)


def _served(found: Measured) -> list[Serving]:
    """The part of each storage service that would serve all hosts."""
    assert found.need is not None
    size = found.record or min(READ_BYTES, found.size / len(found.files))
    return [
        serving(
            service, found.need * found.hosts, found.hosts, data_bytes=found.size, read_bytes=size,
            prices=found.prices,
        )
        for service in SERVICES.values()
    ]  # fmt: skip


def _services(found: Measured) -> list[str]:
    """The same for a terminal."""
    served = _served(found)
    one = services_table(served)
    return [table(one.headers, one.rows, one.align), *services_assumed(served), *counted(found.prices)]


def as_json(found: Measured) -> dict[str, Any]:
    """The answer for programs."""
    return {
        "weft": "storage",
        "version": 1,
        "path": found.path,
        "files": len(found.files),
        "bytes": found.size,
        "rates": [rate._asdict() | {"state": rate.state} for rate in found.rates],
        "fio": [one._asdict() for one in found.fio],
        "need_bytes_per_s": found.need,
        "gives_bytes_per_s": found.best.bytes_per_s,
        "readers": found.best.readers,
        "serves": found.serves,
        "advice": advice(found),
        "services": [] if found.need is None else [services_json(one) for one in _served(found)],
    }
