"""A host's measures at each moment, a line each: `host-<name>.system.jsonl`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any, NamedTuple

from weft.analysis.run import Device, Sample
from weft.profiler.clock import Clock
from weft.profiler.lines import LineFile, read_lines
from weft.timeline import LATEST_S
from weft.untrusted import LARGEST, shown_path, shown_text

SUFFIX = ".system.jsonl"
MOST_CORES = 100_000
_NAMES = [each.name for each in fields(Sample)]
_CORES, _DEVICES = _NAMES.index("cores"), _NAMES.index("devices")
_WHOLE = {"running", "memory_bytes", "memory_limit_bytes", "loaders"}


def samples_path(folder: Path, host: str) -> Path:
    """The file of a host in the folder of a recording."""
    return folder / f"host-{re.sub(r'[^A-Za-z0-9._-]', '_', host)[:100]}{SUFFIX}"


def open_samples(folder: Path, host: str, clock: Clock) -> LineFile:
    """Begin the file of a host; one that is there is replaced."""
    return LineFile(
        samples_path(folder, host), "system", {"host": host, **clock.to_record(), "fields": _NAMES}
    )


def line_of(sample: Sample) -> str:
    """A sample as one line of JSON: its fields in order."""
    values = [getattr(sample, name) for name in _NAMES]
    for at, value in enumerate(values):
        if isinstance(value, float):
            values[at] = round(value, 4)
    values[_CORES] = [round(share, 3) for share in sample.cores]
    values[_DEVICES] = [[_finite(value) for value in astuple(device)] for device in sample.devices]
    return json.dumps(values, separators=(",", ":"))


class SamplesFile(NamedTuple):
    """A file that was read. ``warnings``: what is wrong with it."""

    name: str
    clock: Clock
    samples: list[Sample]
    warnings: list[str]


def read_samples(path: Path) -> SamplesFile:
    """The samples of a host, by time.

    Raises:
        FormatError: Nothing can be read.
    """
    header, lines, warnings = read_lines(path, "system")
    found = [_sample(line) for line in lines]
    samples = sorted((each for each in found if each is not None), key=lambda sample: sample.at_s)
    if None in found:
        warnings.append(f"{shown_path(path)}: {found.count(None)} lines are no samples and left out")
    return SamplesFile(
        shown_text(str(header.get("host", path.name))), Clock.from_record(header, path), samples, warnings
    )


def _sample(line: Any) -> Sample | None:
    """The sample in a line; nothing if it cannot be one."""
    if not isinstance(line, list) or len(line) != len(_NAMES):
        return None
    values = dict(zip(_NAMES, line, strict=True))
    cores, devices = values.pop("cores"), values.pop("devices")
    if not isinstance(cores, list) or not isinstance(devices, list) or len(cores) > MOST_CORES:
        return None
    if not all(_is_number(value) for value in (*values.values(), *cores)) or abs(values["at_s"]) > LATEST_S:
        return None
    if not all(type(values[name]) is int for name in _WHOLE):
        return None
    found = [_device(device) for device in devices]
    return None if None in found else Sample(**values, cores=tuple(cores), devices=tuple(found))  # type: ignore[arg-type]


def _device(values: Any) -> Device | None:
    if not isinstance(values, list) or len(values) != len(fields(Device)):
        return None
    numbers: list[Any]
    *numbers, throttled = (math.nan if value is None else value for value in values)
    if not all(value != value or _is_number(value) for value in numbers) or type(throttled) is not bool:
        return None
    if type(numbers[1]) is not int or type(numbers[2]) is not int:
        return None
    busy, memory_bytes, limit_bytes, power_w, clock_mhz = numbers
    return Device(busy, memory_bytes, limit_bytes, power_w, clock_mhz, throttled)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
