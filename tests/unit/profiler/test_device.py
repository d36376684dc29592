"""A device that runs behind the host, with a clock of its own, and a host that never waits for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.profiler import device as device_module
from weft.profiler.device import DeviceTimes
from weft.profiler.reading import read_recording
from weft.profiler.recorder import Recorder


class Device:
    """Stands in for a GPU and its stream. Its clock is 500 s ahead of the host's."""

    AHEAD_S = 500.0

    def __init__(self) -> None:
        self.now = 10.0
        self.busy_until = 0.0
        self.events = 0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def hand_over(self, takes_s: float) -> tuple[float, float]:
        """The host hands over work, which takes it a tenth of a second."""
        start_s = self.now
        self.busy_until = max(self.busy_until, start_s) + takes_s
        self.now += 0.1
        return start_s, self.now

    def event(self) -> DeviceEvent:
        self.events += 1
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, float("inf")

    def record(self) -> None:
        self.at_s = max(self.device.busy_until, self.device.now)

    def query(self) -> bool:
        return self.at_s <= self.device.now

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        assert self.query() and end_event.query(), "it would have to be waited for"
        return ((end_event.at_s + Device.AHEAD_S) - (self.at_s + Device.AHEAD_S)) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def near(*spans: tuple[object, ...]) -> list[tuple[object, ...]]:
    return [
        (pytest.approx(start, abs=1e-3), pytest.approx(end, abs=1e-3), what) for start, end, what in spans
    ]


def test_work_has_the_device_s_times_when_it_has_passed(gpu: Device):
    found: list[tuple[object, ...]] = []
    times = DeviceTimes(gpu.event, lambda *span: found.append(span))
    times.tie()
    times.put(*gpu.hand_over(1.0), "a")  # 10.0 to 11.0, handed over until 10.1
    times.put(*gpu.hand_over(0.5), "b")  # 11.0 to 11.5
    assert found == []
    gpu.now = 11.2
    times.look()
    assert found == near((10.0, 11.0, "a"))
    gpu.now = 13.0
    times.put(*gpu.hand_over(0.05), "c")
    assert found == near((10.0, 11.0, "a"), (11.0, 11.5, "b"), (13.0, 13.1, "c"))


def test_events_are_used_again(gpu: Device):
    times = DeviceTimes(gpu.event, lambda *span: None)
    for _ in range(50):
        times.tie()
        times.put(*gpu.hand_over(0.01), "a")
        gpu.now += 1.0
        times.look()
    assert gpu.events <= 4


def test_a_busy_device_keeps_its_earlier_tie(gpu: Device):
    found: list[tuple[object, ...]] = []
    times = DeviceTimes(gpu.event, lambda *span: found.append(span))
    times.tie()
    times.put(*gpu.hand_over(5.0), "a")
    times.tie()
    gpu.now = 20.0
    times.look()
    assert found == near((10.0, 15.0, "a"))


def test_without_a_tie_or_a_free_event_the_host_s_times_count(gpu: Device, monkeypatch):
    found: list[tuple[object, ...]] = []
    times = DeviceTimes(gpu.event, lambda *span: found.append(span))
    gpu.hand_over(9.0)
    times.tie()
    times.put(*gpu.hand_over(1.0), "a")
    assert found == near((10.1, 10.2, "a")) and times.dropped == 1
    gpu.now = 30.0
    times.tie()
    monkeypatch.setattr(device_module, "POOL", 2)
    for what in "bcde":
        times.put(*gpu.hand_over(100.0), what)
    assert times.dropped > 1 and found[-1][2] == "e"
    times.close()
    assert sorted(what for _, _, what in found) == list("abcde"), (
        "what the device has not passed is told at the end"
    )


def test_a_recorder_times_work_by_them_and_waits_by_the_host(gpu: Device, tmp_path: Path):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.use_events(gpu.event, lambda: False)
    start_s, end_s = gpu.hand_over(2.0)
    recorder.add("F", 1, 0, start_s, end_s, stage=3)
    recorder.add("wait", 1, 0, end_s, end_s + 0.5, peer=0)
    gpu.now = 20.0
    recorder.close()
    found = {span.kind: span for span in read_recording(tmp_path).timeline.spans}
    assert found["F"].duration_s == pytest.approx(2.0, abs=1e-4) and found["F"].stage == 3
    assert found["wait"].duration_s == pytest.approx(0.5)


def test_no_event_is_asked_while_work_is_captured(gpu: Device):
    found: list[tuple[object, ...]] = []
    captures = []
    times = DeviceTimes(gpu.event, lambda *span: found.append(span), lambda: bool(captures))
    times.tie()
    times.put(*gpu.hand_over(1.0), "a")
    captures.append("a graph")
    made, gpu.now = gpu.events, 20.0
    times.tie()
    times.put(20.0, 20.5, "captured")
    times.look()
    assert found == [(20.0, 20.5, "captured")] and gpu.events == made and times.dropped == 0
    captures.clear()
    times.look()
    assert found[1:] == near((10.0, 11.0, "a"))
