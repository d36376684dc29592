"""Measures a host: its cores, memory, disks and network, the job's processes, and its GPUs.

A look has what changes within a step: cores, the run queue, processor time of the job's processes. Memory, disks and
network are looked at every `REST_S` and hold until then, which leaves their means as they are. Which processes a rank
has started is looked up where a process has begun somewhere, and the more rarely the longer that takes, as it means to
read of every process of the host. GPUs are asked by NVIDIA's library (`nvidia-ml-py`, the module ``pynvml``).
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from weft.analysis.run import Device, Sample
from weft.profiler.host.linux import Core, Load, Stat, Threads, started_by

THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
"""Reasons for a slower clock: the power cap, the hardware, heat as software and as hardware see it, the power brake."""


class Gpus:
    """The GPUs of this host; none where the library or a GPU is missing.

    Args:
        library: The module, or a fake of it.
    """

    def __init__(self, library: Any = None) -> None:
        self._library, self._handles = library, []
        if library is None:
            with suppress(ImportError):
                self._library = importlib.import_module("pynvml")
        if self._library is None:
            return
        with suppress(Exception):  # no driver, say; the library's errors are of its own kinds
            self._library.nvmlInit()
            count = self._library.nvmlDeviceGetCount()
            self._handles = [self._library.nvmlDeviceGetHandleByIndex(number) for number in range(count)]

    def look(self) -> tuple[Device, ...]:
        """The present state of each GPU."""
        return tuple(map(self._device, self._handles))

    def _device(self, handle: Any) -> Device:
        library = self._library
        memory = _known(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        return Device(
            _number(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            0 if memory is None else int(memory.used),
            0 if memory is None else int(memory.total),
            _number(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
            _number(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            bool(
                (_known(lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0) & THROTTLED
            ),
        )


def _known(ask: Callable[[], Any]) -> Any:
    """The library's answer; None where this GPU has none."""
    with suppress(Exception):
        return ask()
    return None


def _number(ask: Callable[[], Any]) -> float:
    found = _known(ask)
    return math.nan if found is None else float(found)


REST_S = 2.0
SCAN_S = 2.0
SCAN_SHARE = 2500
"""A look-up of processes that takes so much processor time is made again after so many times that long."""


class Rest(NamedTuple):
    """Memory, and what went over disks and cards until a moment, in bytes."""

    at_s: float
    memory: int
    limit: int
    read: int = 0
    written: int = 0
    sent: int = 0
    received: int = 0


class Rates(NamedTuple):
    """Bytes a second."""

    read: float
    written: float
    sent: float
    received: float


class Sampler:
    """One host.

    Args:
        system: The module ``psutil``, or a fake of it.
        ranks: The process ids of the job's ranks here.
        gpus: The GPUs.
        clock: Seconds on the clock of the recording.
        own_pid: The process that samples, which is no loader.
        used: Processor seconds of this thread.
        threads: Those of the host.
        cores: What its cores have done; where this is empty, `system` is asked.
        started: What each process has started, and these in turn; where this is empty, `system` is asked.
    """

    def __init__(
        self,
        system: Any,
        ranks: Callable[[], Iterable[int]],
        gpus: Gpus,
        clock: Callable[[], float] = time.perf_counter,
        own_pid: int = 0,
        used: Callable[[], float] = time.thread_time,
        threads: Callable[[], Threads] | None = None,
        cores: Callable[[], list[Core]] | None = None,
        started: Callable[[Iterable[int]], Mapping[int, list[int]]] = started_by,
    ) -> None:
        self._used = used
        self._system, self._ranks, self._gpus, self._clock, self._own = system, ranks, gpus, clock, own_pid
        self._threads, self._cores = threads or Load().look, cores or Stat().look
        self._started = started
        self._before = self._count()
        self._rest = self._look_at_rest()
        self._rates: Rates | None = None
        self._processes: dict[int, Any] = {}
        self._loaders: set[int] = set()
        self._times: dict[int, float] = {}
        self._scan_at_s = float("-inf")
        self._scanned: tuple[int, list[int]] = 0, []
        self._look_at_processes(self._threads().last)

    def sample(self) -> Sample:
        """The host's measures since the last call, or since the beginning."""
        now_s, before = self._clock(), self._before
        self._before = now = self._count()
        pairs = list(zip(now, before, strict=False))
        cores = tuple(_share(core.busy - then.busy, core.total - then.total) for core, then in pairs)
        all_s = sum(core.total - then.total for core, then in pairs)
        busy_s = sum(core.busy - then.busy for core, then in pairs)
        wait_s = sum(core.io_wait - then.io_wait for core, then in pairs)
        threads = self._threads()
        ours_s, loaders_s = self._look_at_processes(threads.last)
        rates, ours = self._find_rates(now_s), _share(ours_s, all_s)
        return Sample(
            now_s, cores, _share(wait_s, all_s), threads.running,
            self._rest.memory, self._rest.limit, rates.read, rates.written, rates.sent, rates.received,
            ours, len(self._loaders), _share(loaders_s, all_s),
            max(0.0, _share(busy_s, all_s) - ours), self._gpus.look(),
        )  # fmt: skip

    def _count(self) -> list[Core]:
        found = self._cores()
        for each in () if found else self._system.cpu_times(percpu=True):
            total = sum(each) - getattr(each, "guest", 0.0) - getattr(each, "guest_nice", 0.0)
            wait = getattr(each, "iowait", 0.0)
            found.append(Core(total - each.idle - wait, total, wait))
        return found

    def _find_rates(self, now_s: float) -> Rates:
        """The rates of disks and network as they were found last, which may be now."""
        if self._rates is None or now_s >= self._rest.at_s + REST_S:
            now, before = self._look_at_rest(), self._rest
            passed_s = max(1e-9, now.at_s - before.at_s)
            self._rest = now
            self._rates = Rates(
                *(max(0, after - then) / passed_s for after, then in zip(now[3:], before[3:], strict=True))
            )
        return self._rates

    def _look_at_rest(self) -> Rest:
        system = self._system
        memory = system.virtual_memory()
        disk = cards = None
        with suppress(NotImplementedError, OSError):  # of a container
            disk = system.disk_io_counters(nowrap=False)
        with suppress(NotImplementedError, OSError):
            cards = system.net_io_counters(pernic=True, nowrap=False)
        others = [card for name, card in (cards or {}).items() if name != "lo"]
        return Rest(
            self._clock(), int(memory.total - memory.available), int(memory.total),
            0 if disk is None else disk.read_bytes, 0 if disk is None else disk.write_bytes,
            sum(card.bytes_sent for card in others), sum(card.bytes_recv for card in others),
        )  # fmt: skip

    def _look_at_processes(self, last: int = 0) -> tuple[float, float]:
        """Processor seconds of the job here since the last look, and those of what its ranks have started.

        ``last``: the number of the process that began last, if it is known.
        """
        now = self._clock()
        if now >= self._scan_at_s:
            began_s = self._used()
            ranks = list(self._ranks())
            if not last or (last, ranks) != self._scanned:
                self._scan(ranks)
            self._scanned = last, ranks
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

    def _scan(self, ranks: list[int]) -> None:
        """Find the ranks and the processes that they have started."""
        found: dict[int, Any] = {}
        loaders: set[int] = set()
        started = self._started(ranks)
        for pid in ranks:
            with suppress(self._system.Error):
                rank = self._processes.get(pid) or self._system.Process(pid)
                found[pid] = rank
                children = (
                    [each.pid for each in rank.children(recursive=True)] if not started else started[pid]
                )
                for child in children:
                    with suppress(self._system.Error):
                        if child != self._own:
                            found[child] = self._processes.get(child) or self._system.Process(child)
                            loaders.add(child)
        self._processes, self._loaders = found, loaders - set(ranks)


def _share(part: float, whole_: float) -> float:
    return min(1.0, max(0.0, part / whole_)) if whole_ > 0 else 0.0
