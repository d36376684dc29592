"""A host whose counters are known, measured."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.profiler.test_run import FACTS
from weft.profiler.clock import Clock
from weft.profiler.facts import write_facts
from weft.profiler.host import child
from weft.profiler.host.child import LocalRanks, start_sampler
from weft.profiler.host.gpus import Gpus
from weft.profiler.host.sampler import SCAN_S, Sampler, _running
from weft.profiler.samples import read_samples


class Gone(Exception):
    """What the stand-in raises for a process that has ended."""


class Host:
    """Stands in for psutil: two cores, a disk, a network card, processes; everything counts as a test says."""

    Error = Gone

    def __init__(self) -> None:
        self.now = 0.0
        self.cores = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]  # user, idle, iowait
        self.disk = SimpleNamespace(read_bytes=0, write_bytes=0)
        self.cards = {name: SimpleNamespace(bytes_sent=0, bytes_recv=0) for name in ("lo", "eth0")}
        self.took: dict[int, float] = {}
        self.children_of: dict[int, list[int]] = {}
        self.scans = 0

    def cpu_times(self, percpu: bool) -> list[object]:
        assert percpu
        return [Times(*core) for core in self.cores]

    def disk_io_counters(self, nowrap: bool) -> object:
        return self.disk

    def net_io_counters(self, pernic: bool, nowrap: bool) -> object:
        assert pernic
        return self.cards

    def virtual_memory(self) -> object:
        return SimpleNamespace(total=1000, available=400)

    def Process(self, pid: int) -> HostProcess:
        if pid not in self.took:
            raise Gone
        return HostProcess(self, pid)

    def sampler(self, ranks: list[int]) -> Sampler:
        return Sampler(self, lambda: ranks, Gpus(SimpleNamespace()), lambda: self.now, 99, lambda: self.now)


class Times(tuple):
    """A core's seconds, as psutil has them."""

    def __new__(cls, user: float, idle: float, iowait: float) -> Times:
        made = super().__new__(cls, (user, idle, iowait))
        made.idle, made.iowait = idle, iowait  # type: ignore[attr-defined]
        return made


class HostProcess:
    def __init__(self, host: Host, pid: int) -> None:
        self.host, self.pid = host, pid

    def cpu_times(self) -> object:
        if self.pid not in self.host.took:
            raise Gone
        return SimpleNamespace(user=self.host.took[self.pid] / 2, system=self.host.took[self.pid] / 2)

    def children(self, recursive: bool) -> list[HostProcess]:
        self.host.scans += 1
        return [HostProcess(self.host, pid) for pid in self.host.children_of.get(self.pid, [])]


def test_shares_and_rates_are_those_since_the_look_before():
    host = Host()
    host.took = {10: 5.0, 11: 1.0, 20: 7.0, 99: 3.0}
    host.children_of = {10: [20, 99]}
    sampler = host.sampler([10, 11])
    host.now += 2.0
    host.cores = [[1.5, 0.25, 0.25], [0.5, 1.5, 0.0]]
    host.disk.read_bytes, host.disk.write_bytes = 1000, 500
    host.cards["eth0"].bytes_sent, host.cards["eth0"].bytes_recv, host.cards["lo"].bytes_sent = (
        200,
        100,
        10**9,
    )
    host.took |= {10: 5.5, 11: 1.25, 20: 7.5, 99: 4.0}
    sample = sampler.sample()
    assert sample.at_s == 2.0 and sample.cores == (0.75, 0.25) and sample.io_wait == 0.0625
    assert (sample.memory_bytes, sample.memory_limit_bytes) == (600, 1000)
    assert (sample.read_rate, sample.write_rate, sample.sent_rate, sample.received_rate) == (
        500,
        250,
        100,
        50,
    )
    assert sample.loaders == 1 and sample.loaders_share == 0.125, "the sampler itself is none"
    assert sample.ours == 1.25 / 4 and sample.others == 0.5 - 1.25 / 4
    host.now += 1.0
    assert sampler.sample().cores == (0.0, 0.0)


def test_processes_come_and_go():
    host = Host()
    host.took = {10: 5.0}
    sampler = host.sampler([10, 12])
    host.took[20] = 1.0
    host.children_of = {10: [20]}
    host.now += SCAN_S / 2
    assert sampler.sample().loaders == 0 and host.scans == 1
    host.now += SCAN_S
    host.cores = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    assert sampler.sample().loaders == 1 and host.scans == 2
    del host.took[20]
    host.children_of = {}
    host.now += 0.5
    assert sampler.sample().loaders == 0
    del host.took[10]
    host.now += SCAN_S
    assert sampler.sample().ours == 0.0


def test_a_long_look_at_processes_is_made_rarely():
    host = Host()
    host.took = {10: 0.0}
    sampler = host.sampler([10])
    slow = HostProcess.children

    def children(self, recursive):
        host.now += 0.05
        return slow(self, recursive)

    HostProcess.children = children
    try:
        host.now += SCAN_S
        sampler.sample()
        for _ in range(98):
            host.now += 0.5
            sampler.sample()
        assert host.scans == 2
        host.now += 2.0
        sampler.sample()
        assert host.scans == 3
    finally:
        HostProcess.children = slow


def test_threads_that_want_to_run():
    assert _running() >= 1


class Library:
    """Stands in for the module ``pynvml``: a GPU that tells everything, and one that tells little."""

    NVML_CLOCK_SM = 1

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return SimpleNamespace(used=5, total=8)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._only_first(handle, 250_000)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return self._only_first(handle, 1410)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._only_first(handle, 0x20)

    def _only_first(self, handle: int, value: int) -> int:
        if handle:
            raise RuntimeError("not supported")
        return value


def test_gpus():
    first, second = Gpus(Library()).look()
    assert (first.busy, first.memory_bytes, first.memory_limit_bytes) == (0.75, 5, 8)
    assert (first.power_w, first.clock_mhz, first.throttled) == (250.0, 1410.0, True)
    assert second.busy == 0.75 and math.isnan(second.power_w) and math.isnan(second.clock_mhz)
    assert not second.throttled


def test_no_gpus(monkeypatch):
    def fails() -> None:
        raise RuntimeError("no driver")

    library = Library()
    monkeypatch.setattr(library, "nvmlInit", fails)
    assert Gpus(library).look() == ()


def test_ranks_of_this_host_by_their_files(tmp_path: Path):
    here, there = Clock(b"h" * 16, 0.0), Clock(b"t" * 16, 0.0)
    ranks = LocalRanks(tmp_path, here)
    assert ranks() == []
    write_facts(tmp_path, FACTS, here)
    write_facts(tmp_path, replace(FACTS, rank=1, pid=8), there)
    (tmp_path / "rank2.facts.json").write_text("{")
    assert ranks() == [7]
    write_facts(tmp_path, replace(FACTS, pid=12345), here)
    assert ranks() == [12345]


def test_a_process_of_its_own_measures_this_host(tmp_path: Path):
    pytest.importorskip("psutil")
    end = start_sampler(tmp_path)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [path for path in tmp_path.glob("host-*.system.jsonl") if "\n[" in path.read_text()]
        if found:
            break
        time.sleep(0.05)
    end()
    (path,) = tmp_path.glob("host-*.system.jsonl")
    host = read_samples(path)
    assert host.samples and host.clock.identity == Clock.here().identity
    assert all(0 <= share <= 1 for share in host.samples[0].cores) and host.samples[0].memory_bytes > 0
    size = path.stat().st_size
    time.sleep(0.7)
    assert path.stat().st_size == size, "it has ended"


def test_it_ends_with_its_parent(tmp_path: Path):
    pytest.importorskip("psutil")
    script = f"""
import os, signal, time
from pathlib import Path
from weft.profiler.host.child import start_sampler
start_sampler(Path({str(tmp_path)!r}))
while not any(Path({str(tmp_path)!r}).glob("host-*")):
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], timeout=60)
    (path,) = tmp_path.glob("host-*.system.jsonl")
    until = time.monotonic() + 30
    while time.monotonic() < until:
        size = path.stat().st_size
        time.sleep(1.2)
        if path.stat().st_size == size:
            return
    pytest.fail("it goes on without its parent")


def test_without_psutil_the_extra_is_named(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None)
    start_sampler(tmp_path)()
    (record,) = caplog.records
    assert record.getMessage().endswith("because psutil is not installed: pip install weft[report]")
    assert list(tmp_path.iterdir()) == []
