"""The clock of a process, and how it compares to others.

Times in files are seconds of `time.perf_counter`. Processes with the same `identity` (one host, one boot) share it, so
that what they write lines up exactly; only those of different hosts meet by what `weft.profiler.host.clocks` found, or
by the hosts' wall clocks.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import FormatError
from weft.timeline import LATEST_S


class Clock(NamedTuple):
    """A process's clock.

    Attributes:
        identity: 16 bytes, equal for processes whose clock is the same.
        offset_s: To add to its times for seconds since 1970.
    """

    identity: bytes
    offset_s: float

    @classmethod
    def here(cls) -> Clock:
        """That of this process."""
        return cls(clock_identity(), clock_offset_s())

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"clock": self.identity.hex(), "offset_s": self.offset_s}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], path: Path) -> Clock:
        """The clock of a record from `to_record`; ``path`` is that of the file, for errors."""
        identity, offset_s = record.get("clock"), record.get("offset_s")
        if isinstance(identity, str) and isinstance(offset_s, float) and abs(offset_s) <= LATEST_S:
            with suppress(ValueError):
                return cls(bytes.fromhex(identity), offset_s)
        raise FormatError(f"{path} does not name its clock, so its times mean nothing: record again")


def clock_offset_s() -> float:
    """The seconds to add to ``perf_counter`` for the wall clock: of several readings the one that took the least
    time."""
    readings = []
    for _ in range(16):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def clock_identity() -> bytes:
    """16 bytes that processes share whose ``perf_counter`` is the same clock: those of one host since its start.

    A container may have a clock of its own: it is in another time namespace then.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = b""
        with suppress(OSError):  # kernels before 5.6 have none
            space = os.readlink("/proc/self/ns/time").encode()
        return hashlib.sha256(boot + space).digest()[:16]
    return hashlib.sha256(socket.gethostname().encode(errors="replace")).digest()[:16]
