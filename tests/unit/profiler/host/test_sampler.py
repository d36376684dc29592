"""A host whose counters are known, measured."""

from __future__ import annotations

import math
import os
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
from weft.profiler.host.linux import Core, Load, Stat, Threads, started_by
from weft.profiler.host.sampler import REST_S, SCAN_S, SCAN_SHARE, Gpus, Sampler
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
        self.last = 0

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
        return Sampler(
            self, lambda: ranks, Gpus(SimpleNamespace()), lambda: self.now, 99, lambda: self.now,
            lambda: Threads(3, self.last), list, lambda pids: {},
        )  # fmt: skip


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


def test_a_long_look_at_processes_is_made_rarely(monkeypatch):
    host = Host()
    host.took = {10: 0.0}
    sampler = host.sampler([10])
    plain = HostProcess.children

    def children(self, recursive):
        host.now += 0.05
        return plain(self, recursive)

    monkeypatch.setattr(HostProcess, "children", children)
    host.now += SCAN_S
    sampler.sample()
    host.now += 0.05 * SCAN_SHARE - 1.0
    sampler.sample()
    assert host.scans == 2
    host.now += 1.0
    sampler.sample()
    assert host.scans == 3


def test_where_no_process_has_begun_none_is_looked_for():
    host = Host()
    host.took, host.last, ranks = {10: 0.0, 11: 0.0}, 500, [10]
    sampler = host.sampler(ranks)
    host.now += SCAN_S
    sampler.sample()
    assert host.scans == 1
    ranks.append(11)  # it is older than the look, and says only now that it is a rank
    host.now += SCAN_S
    sampler.sample()
    assert host.scans == 3
    host.now, host.last = host.now + SCAN_S, 501
    sampler.sample()
    assert host.scans == 5


def test_memory_disks_and_network_hold_until_they_are_looked_at_again():
    host = Host()
    sampler = host.sampler([])
    rates = []
    for read in (100, 5000, 5000, 5000, 5000, 9000):
        host.now, host.disk.read_bytes = host.now + REST_S / 4, read
        rates.append(sampler.sample().read_rate)
    assert rates == [200, 200, 200, 200, 2450, 2450], "what was read since the look before, each time"


def test_a_host_without_counters_of_disks(monkeypatch):
    def fails(nowrap: bool) -> object:
        raise NotImplementedError("neither /proc/diskstats nor /sys/block")

    host = Host()
    monkeypatch.setattr(host, "disk_io_counters", fails)
    sampler = host.sampler([])
    host.now, host.cards["eth0"].bytes_sent = 1.0, 10
    sample = sampler.sample()
    assert (sample.read_rate, sample.sent_rate) == (0, 10)


def test_load(tmp_path: Path):
    path = tmp_path / "loadavg"
    path.write_text("0.20 0.18 0.12 3/80 11206\n")
    load = Load(str(path))
    assert load.look() == (3, 11206)
    path.write_text("1.20 0.18 0.12 5/80 11207\n")
    assert load.look() == (5, 11207)
    path.write_text("nothing")
    assert load.look() == Load(str(tmp_path / "none")).look() == (0, 0)
    assert Load().look().running >= 1


def test_cores(tmp_path: Path, monkeypatch):
    path = tmp_path / "stat"
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    path.write_text(
        "cpu  9 9\ncpu0 100 50 25 700 25 0 50 50 60 0\ncpu1 0 0 0 100 0 0 0 0 0 0\nintr 5 6\ncpu2 1\n"
    )
    assert Stat(str(path)).look() == [Core(2.75, 10.0, 0.25), Core(0.0, 1.0, 0.0)], "a guest is in the first"
    assert Stat(str(tmp_path / "none")).look() == []


def test_what_processes_have_started(tmp_path: Path):
    parents = {10: 1, 11: 1, 20: 10, 21: 10, 30: 21, 40: 11, 50: 2}
    for pid, parent in parents.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (name) 5 5) S {parent} 1 1")
    (tmp_path / "60").mkdir()  # it has ended meanwhile
    (tmp_path / "sys").mkdir()
    found = started_by([10, 11, 12], str(tmp_path))
    assert {pid: sorted(each) for pid, each in found.items()} == {10: [20, 21, 30], 11: [40], 12: []}
    assert started_by([10], str(tmp_path / "none")) == {}


def test_what_this_process_has_started():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = started_by([os.getpid()])
        process.communicate(b"")
    assert process.pid in found[os.getpid()]


def test_cores_of_this_host_are_those_of_psutil():
    psutil = pytest.importorskip("psutil")
    ours, theirs = Stat().look(), psutil.cpu_times(percpu=True)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert abs(one.total - (sum(other) - other.guest - other.guest_nice)) < 60
        assert abs(one.io_wait - other.iowait) < 60


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
    ranks = LocalRanks(tmp_path, here, FACTS.host)
    assert ranks() == []
    write_facts(tmp_path, FACTS, here)
    write_facts(tmp_path, replace(FACTS, rank=1, pid=8), there)
    (tmp_path / "rank2.facts.json").write_text("{")
    assert ranks() == [7]
    write_facts(tmp_path, replace(FACTS, pid=12345), here)
    assert ranks() == [12345]
    write_facts(tmp_path, replace(FACTS, host="another container"), here)
    assert ranks() == []


def test_a_sampler_that_fails_is_told(tmp_path: Path, caplog):
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().children()
    end = start_sampler(tmp_path / "none")  # a folder that is not there
    (process,) = (each for each in psutil.Process().children() if each not in before)
    until = time.monotonic() + 60
    while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.05)
    end()
    assert "since its sampler ended with exit code 1; to see why: python -m weft.profiler" in caplog.text


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
