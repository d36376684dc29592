"""Measures a host: its cores, memory, disks and network, the job's processes, and its GPUs.

Shares and rates are those since the look before. Which processes a rank has started is looked up rarely, and the more
rarely the longer that takes, as it means to read of every process of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from weft.analysis.run import Sample
from weft.foreign import whole
from weft.profiler.host.gpus import Gpus

SCAN_S = 2.0
SCAN_SHARE = 1000
"""A look-up of processes that takes so much processor time is made again after so many times that long."""


class Counters(NamedTuple):
    """What only grows, at one moment; seconds and bytes."""

    at_s: float
    busy: list[float]
    total: list[float]
    io_wait: float
    read: int
    written: int
    sent: int
    received: int


class Sampler:
    """One host.

    Args:
        system: The module ``psutil``, or a stand-in for it.
        ranks: The process ids of the job's ranks here.
        gpus: The GPUs.
        clock: Seconds on the clock of the recording.
    """

    def __init__(
        self,
        system: Any,
        ranks: Callable[[], Iterable[int]],
        gpus: Gpus,
        clock: Callable[[], float] = time.perf_counter,
        own_pid: int = 0,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self._used = used
        self._system, self._ranks, self._gpus, self._clock, self._own = system, ranks, gpus, clock, own_pid
        self._before = self._count()
        self._processes: dict[int, Any] = {}
        self._loaders: set[int] = set()
        self._times: dict[int, float] = {}
        self._scan_at_s = float("-inf")
        self._look_at_processes()

    def sample(self) -> Sample:
        """What the host did since the last call, or since the beginning."""
        now, before = self._count(), self._before
        self._before = now
        passed_s = max(1e-9, now.at_s - before.at_s)
        cores = tuple(
            _share(busy - busy_then, total - total_then)
            for busy, busy_then, total, total_then in zip(
                now.busy, before.busy, now.total, before.total, strict=False
            )
        )
        all_s = sum(now.total) - sum(before.total)
        ours_s, loaders_s = self._look_at_processes()
        memory = self._system.virtual_memory()
        ours = _share(ours_s, all_s)
        return Sample(
            now.at_s, cores, _share(now.io_wait - before.io_wait, all_s), _running(),
            int(memory.total - memory.available), int(memory.total),
            max(0, now.read - before.read) / passed_s, max(0, now.written - before.written) / passed_s,
            max(0, now.sent - before.sent) / passed_s, max(0, now.received - before.received) / passed_s,
            ours, len(self._loaders), _share(loaders_s, all_s),
            max(0.0, _share(sum(now.busy) - sum(before.busy), all_s) - ours), self._gpus.look(),
        )  # fmt: skip

    def _count(self) -> Counters:
        system = self._system
        cores = system.cpu_times(percpu=True)
        total = [sum(each) - getattr(each, "guest", 0.0) - getattr(each, "guest_nice", 0.0) for each in cores]
        waits = [getattr(each, "iowait", 0.0) for each in cores]
        idle = [each.idle + wait for each, wait in zip(cores, waits, strict=True)]
        disk = system.disk_io_counters(nowrap=False)
        cards = [
            card for name, card in system.net_io_counters(pernic=True, nowrap=False).items() if name != "lo"
        ]
        return Counters(
            self._clock(), [all_s - idle_s for all_s, idle_s in zip(total, idle, strict=True)], total, sum(waits),
            0 if disk is None else disk.read_bytes, 0 if disk is None else disk.write_bytes,
            sum(card.bytes_sent for card in cards), sum(card.bytes_recv for card in cards),
        )  # fmt: skip

    def _look_at_processes(self) -> tuple[float, float]:
        """Processor seconds of the job here since the last look, and those of what its ranks have started."""
        now = self._clock()
        if now >= self._scan_at_s:
            began_s = self._used()
            self._scan()
            self._scan_at_s = now + max(SCAN_S, SCAN_SHARE * (self._used() - began_s))
        ours_s = loaders_s = 0.0
        times: dict[int, float] = {}
        for pid, process in list(self._processes.items()):
            try:
                found = process.cpu_times()
            except self._system.Error:  # it has ended
                del self._processes[pid]
                self._loaders.discard(pid)
                continue
            times[pid] = found.user + found.system
            took_s = max(0.0, times[pid] - self._times.get(pid, times[pid]))
            ours_s += took_s
            loaders_s += took_s if pid in self._loaders else 0.0
        self._times = times
        return ours_s, loaders_s

    def _scan(self) -> None:
        """Find the ranks and the processes that they have started."""
        found: dict[int, Any] = {}
        loaders: set[int] = set()
        for pid in self._ranks():
            with suppress(self._system.Error):
                rank = self._processes.get(pid) or self._system.Process(pid)
                found[pid] = rank
                for child in rank.children(recursive=True):
                    if child.pid != self._own:
                        found[child.pid] = self._processes.get(child.pid, child)
                        loaders.add(child.pid)
        self._processes, self._loaders = found, loaders - set(self._ranks())


def _share(part: float, whole_: float) -> float:
    return min(1.0, max(0.0, part / whole_)) if whole_ > 0 else 0.0


def _running() -> int:
    """How many threads of the host run or want to; 0 where it does not tell."""
    with suppress(OSError, IndexError), open("/proc/loadavg", encoding="ascii") as file:
        return whole(file.read(100).split()[3].partition("/")[0]) or 0
    return 0
