"""A device that runs behind the host, with a clock of its own, and a host that never waits for it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.profiler import device as device_module
from weft.profiler import recorder as recorder_module
from weft.profiler.clock import Clock
from weft.profiler.detail import parse_detail
from weft.profiler.device import DeviceTimes
from weft.profiler.reading import read_run
from weft.profiler.recorder import Recorder
from weft.profiler.steps import Book


class Device:
    """Stands in for a GPU and its stream. Its clock is 500 s ahead of the host's."""

    AHEAD_S = 500.0

    def __init__(self) -> None:
        self.now = 10.0
        self.busy_until = 0.0
        self.drift = 0.0
        self.events = 0
        self.ends: list[float] = []

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def hand_over(self, takes_s: float) -> tuple[float, float]:
        """The host hands over work, which takes it a tenth of a second."""
        start_s = self.now
        self.busy_until = max(self.busy_until, start_s) + takes_s
        self.ends.append(self.busy_until)
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
        ahead = 1 + self.device.drift
        return ((end_event.at_s * ahead + Device.AHEAD_S) - (self.at_s * ahead + Device.AHEAD_S)) * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(
        device_module, "time", SimpleNamespace(perf_counter=made.perf_counter, sleep=made.sleep)
    )
    return made


class Told:
    """What was told, in its order."""

    def __init__(self, times: DeviceTimes) -> None:
        self.times, self.spans = times, []

    def work(self, handed_over: tuple[float, float], what: str) -> None:
        self.times.work(*handed_over, lambda *span: self.spans.append((*span, what)))

    def own(self, start_s: float, end_s: float, what: str) -> None:
        self.times.own(start_s, end_s, lambda *span: self.spans.append((*span, what)))

    def __eq__(self, other: object) -> bool:
        return self.spans == [
            (pytest.approx(start, abs=1e-3), pytest.approx(end, abs=1e-3), what) for start, end, what in other
        ]

    def __repr__(self) -> str:
        return repr(self.spans)


def test_work_has_the_device_s_times_when_it_has_passed(gpu: Device):
    told = Told(DeviceTimes(gpu.event))
    told.work(gpu.hand_over(1.0), "a")  # 10.0 to 11.0, handed over until 10.1
    told.work(gpu.hand_over(0.5), "b")  # 11.0 to 11.5
    assert told == []
    gpu.now = 11.2
    told.times.look()
    assert told == [(10.0, 11.0, "a")]
    gpu.now = 13.0
    told.work(gpu.hand_over(0.05), "c")
    assert told == [(10.0, 11.0, "a"), (11.0, 11.5, "b"), (13.0, 13.1, "c")]


def test_what_the_host_does_counts_from_when_the_device_had_no_more_to_do(gpu: Device):
    told = Told(DeviceTimes(gpu.event))
    told.work(gpu.hand_over(1.0), "F")  # 10.0 to 11.0
    told.own(10.1, 10.6, "data")  # all of it while the device was busy
    told.own(10.6, 12.0, "wait")
    gpu.now = 12.0
    told.work(gpu.hand_over(1.0), "B")
    gpu.now = 15.0
    told.times.look()
    assert told == [(10.0, 11.0, "F"), (11.0, 11.0, "data"), (11.0, 12.0, "wait"), (12.0, 13.0, "B")]


def test_a_moment_is_known_when_the_device_gets_there(gpu: Device):
    times = DeviceTimes(gpu.event)
    gpu.hand_over(3.0)
    moment = times.moment()
    assert moment.at_s == pytest.approx(10.1, abs=1e-3)
    gpu.now = 20.0
    times.look()
    assert moment.at_s == pytest.approx(13.0, abs=1e-3)


def test_events_are_used_again(gpu: Device):
    told = Told(DeviceTimes(gpu.event))
    for _ in range(50):
        told.times.tie()
        told.work(gpu.hand_over(0.01), "a")
        gpu.now += 1.0
        told.times.look()
    assert gpu.events <= 4 and len(told.spans) == 50


def test_a_host_that_never_waits_has_the_device_s_times_for_hours(gpu: Device):
    """As a training on one GPU does: the device is never idle, and its clock runs 50 millionths fast."""
    gpu.drift = 50e-6
    told = Told(DeviceTimes(gpu.event))
    for _ in range(5000):
        gpu.hand_over(0.0)
        told.work((gpu.now, gpu.now), "warm")
        start_s, end_s = gpu.hand_over(1.0)
        told.work((start_s, end_s), "F")
        gpu.now = gpu.busy_until - 0.05
        told.times.tie()
    spans = [span for span in told.spans if span[2] == "F"]
    assert len(spans) > 4990 and told.times.dropped == 0
    late = [end - true for (_, end, _), true in zip(spans, gpu.ends[1::2], strict=False)]
    assert max(map(abs, late)) < 0.2, "5000 s would be 0.25 s off without a look at the host's clock"
    assert all(end - start == pytest.approx(1.0, abs=0.11) for start, end, _ in spans[1:])


def test_a_busy_device_keeps_its_earlier_tie(gpu: Device):
    told = Told(DeviceTimes(gpu.event))
    told.work(gpu.hand_over(5.0), "a")
    told.times.tie()
    gpu.now = 20.0
    told.times.look()
    assert told == [(10.0, 15.0, "a")]


def test_without_a_tie_or_a_free_event_the_host_s_times_count(gpu: Device, monkeypatch):
    gpu.hand_over(9.0)
    told = Told(DeviceTimes(gpu.event))
    handed_over = gpu.hand_over(1.0)
    told.work(handed_over, "a")
    told.times.look()
    assert told == [(*handed_over, "a")] and told.times.dropped == 1
    gpu.now = 30.0
    told.times.tie()
    monkeypatch.setattr(device_module, "POOL", 2)
    for what in "bcde":
        told.work(gpu.hand_over(100.0), what)
    assert told.times.dropped > 1
    told.times.close()
    assert [what for _, _, what in told.spans] == list("abcde"), "in order, also what it has not passed"


def test_the_end_waits_for_what_is_left_and_gives_up_on_a_device_that_failed(gpu: Device, monkeypatch):
    told = Told(DeviceTimes(gpu.event))
    told.work(gpu.hand_over(0.5), "a")
    told.times.close()
    assert told == [(10.0, 10.5, "a")]
    told.work(gpu.hand_over(0.5), "b")

    def fail(event: DeviceEvent) -> bool:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(DeviceEvent, "query", fail)
    told.times.close()
    assert [what for _, _, what in told.spans] == ["a", "b"]


def test_a_recorder_times_work_and_steps_by_them(gpu: Device, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recorder_module, "time", device_module.time)
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.book = Book.open(tmp_path, 0, 1, Clock.here())
    recorder.use_events(gpu.event)
    for step in (1, 2, 3):
        recorder.add("data", step, -1, gpu.now, gpu.now + 0.05)
        recorder.begin_step(step)
        start_s, end_s = gpu.hand_over(2.0)
        began = recorder.moment()  # a message leaves within the pass, as those of a pipeline do
        recorder.add("F", step, 0, start_s, end_s, stage=3)
        recorder.end_step(32, 1 << 20)
        recorder.note({"loss": step})
        recorder.add("send", step, 0, began, gpu.now + 0.01)
    gpu.now = 20.0
    recorder.close()
    run = read_run(tmp_path)
    spans = defaultdict(list)
    for span in run.timeline.spans:
        spans[span.kind].append(span)
    work = [span.duration_s for span in spans["F"]]
    assert work == pytest.approx([2.0, 2.0, 2.0], abs=1e-3) and spans["F"][0].stage == 3
    assert [span.duration_s for span in spans["step"]] == pytest.approx([2.0, 2.0, 2.0], abs=1e-3)
    assert len(spans["data"]) == 1, "the device was busy while later data came"
    steps = run.steps[0]
    assert [step.step_s for step in steps] == pytest.approx([2.0, 2.0, 2.0], abs=1e-3)
    assert [step.work_s for step in steps] == pytest.approx([2.0, 2.0, 2.0], abs=1e-3)
    assert [step.values["loss"] for step in steps] == [1, 2, 3]


def test_what_a_device_tells_late_is_kept_with_its_step(gpu: Device, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(recorder_module, "time", device_module.time)
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.detail = parse_detail("2-2")
    recorder.use_events(gpu.event)
    for step in (1, 2, 3, 4):
        recorder.begin_step(step)
        recorder.add("F", step, 0, *gpu.hand_over(2.0))
        recorder.end_step()
        recorder.add("optimizer", step, -1, *gpu.hand_over(0.5))
    gpu.now = 30.0
    recorder.close()
    told = sorted((span.step, span.kind) for span in read_run(tmp_path).timeline.spans)
    assert told == [(2, "F"), (2, "optimizer"), (2, "step")]


def test_no_event_is_asked_while_work_is_captured(gpu: Device):
    captures: list[str] = []
    told = Told(DeviceTimes(gpu.event, lambda: bool(captures)))
    told.work(gpu.hand_over(1.0), "a")
    captures.append("a graph")
    made, gpu.now = gpu.events, 20.0
    told.times.tie()
    told.work((20.0, 20.5), "captured")
    told.times.look()
    assert told == [] and gpu.events == made and told.times.dropped == 0
    captures.clear()
    told.times.look()
    assert told == [(10.0, 11.0, "a"), (20.0, 20.5, "captured")]
