"""Sizes, durations and rates as people write them.

weft takes and prints `24GiB`, `64MB`, `5us` and `25GB/s`. Inside, a size is a whole number of bytes,
a duration is seconds and a rate is bytes in a second.

>>> parse_bytes("1.5KiB"), parse_seconds("5ms"), parse_rate("25GB/s")
(1536, 0.005, 25000000000.0)
>>> format_bytes(1536), format_seconds(0.0123)
('1.5 KiB', '12.3 ms')
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.errors import FormatError
from weft.untrusted import LARGEST, shown_text

BYTES: Mapping[str, int] = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SECONDS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}

_BINARY = ("TiB", "GiB", "MiB", "KiB", "B")
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+(?:/s)?)\s*")


def parse_bytes(text: str) -> int:
    """Bytes from `24GiB`, `64MB` or `512B`."""
    return round(_parse(text, "size", BYTES, "24GiB"))


def parse_seconds(text: str) -> float:
    """Seconds from `5us`, `20ms`, `1.5s`, `10min` or `2h`."""
    return _parse(text, "duration", SECONDS, "5us")


def parse_rate(text: str) -> float:
    """Bytes in a second from `25GB/s`."""
    return _parse(text, "rate", {f"{unit}/s": factor for unit, factor in BYTES.items()}, "25GB/s")


def format_bytes(size: float) -> str:
    """A size in the largest binary unit that leaves at least one."""
    return _format(size, {unit: BYTES[unit] for unit in _BINARY})


def format_seconds(duration: float) -> str:
    """A duration in the largest unit, up to seconds, that leaves at least one."""
    return _format(duration, {unit: SECONDS[unit] for unit in ("s", "ms", "us", "ns")})


def _parse(text: str, what: str, factors: Mapping[str, float], example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    text = shown_text(text)
    if match is None:
        raise FormatError(f'"{text}" is not a {what}: write a number and a unit, for example "{example}"')
    number, unit = match.groups()
    if unit not in factors:
        raise FormatError(f'"{text}" is not a {what}: its unit is "{unit}", known are {", ".join(factors)}')
    value = float(number) * factors[unit]
    if not value <= LARGEST:
        raise FormatError(f'"{text}" is larger than any {what}: write for example "{example}"')
    return value


def _format(value: float, factors: Mapping[str, float]) -> str:
    """Three digits that count, in the first of `factors` (largest first) that fits."""
    unit = next((unit for unit, factor in factors.items() if abs(value) >= factor), None)
    if unit is None:
        unit = list(factors)[-1]
    scaled = value / factors[unit]
    digits = max(0, 2 - len(str(int(abs(scaled)))) + 1)
    number = f"{scaled:.{digits}f}"
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number} {unit}"
