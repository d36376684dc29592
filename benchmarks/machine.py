"""What the benchmarks read from the machine: other processes' load, how fast a core is just now, a process's memory,
the machine's name.

Linux only: all but the pace comes from /proc.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
QUIET_CORES = 0.15
"""Steps during which other processes used more of a core than this are dropped."""
STEADY = 1.15
"""So are those beside which a core took more than this times the time for the work of `pace_s` at full speed."""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Keeps glibc from giving large freed tensors back to the system and faulting the pages in again. All
contenders run with it, so that it decides nothing between them."""


def busy_s() -> float:
    """Processor time that all cores together spent on anything, stolen time included, since the boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_SECOND


def wait_until_quiet(patience_s: float, window_s: float = 0.5) -> float:
    """Sleep until other processes leave the machine alone, at most `patience_s`; the seconds it took."""
    begin = time.monotonic()
    while time.monotonic() - begin < patience_s:
        before, start = busy_s(), time.monotonic()
        time.sleep(window_s)
        if (busy_s() - before) / (time.monotonic() - start) <= QUIET_CORES:
            break
    return time.monotonic() - begin


def pace_s(tries: int = 3) -> float:
    """Processor time, in seconds, of a few milliseconds of arithmetic on the core that this runs on.

    A virtual machine's core can share its hardware with somebody else's, which no figure of the system tells: it is
    slower then, on the machine that these figures are from 1.5 times, for a second or for a minute.
    """
    matrix, times_s = torch.ones(512, 256), []
    for _ in range(tries):
        start_s = time.thread_time()
        for _ in range(2):
            torch.mm(matrix, matrix.t())
        times_s.append(time.thread_time() - start_s)
    return min(times_s)


def reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_rss_bytes() -> int:
    return _status_bytes("VmHWM")


def rss_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no field {field}")


def machine_name() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cores of {name}, Python {platform.python_version()}"
