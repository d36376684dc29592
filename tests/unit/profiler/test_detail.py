"""Of which steps spans are kept, and how large that makes the files."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.analysis.run import Step
from weft.config import resolve
from weft.errors import ConfigError
from weft.profiler import recorder as recorder_module
from weft.profiler.detail import EVERYTHING, NAME, REPORT, SPANS_LIMIT_BYTES, Control, Detail, parse_detail
from weft.profiler.format import RECORD
from weft.profiler.reading import read_recording
from weft.profiler.recorder import Recorder
from weft.profiler.steps import line_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The recorder's clock, which goes as a test says."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def run_steps(
    recorder: Recorder, clock: SimpleNamespace, steps: int, spans: int, late: dict[int, float]
) -> None:
    """Steps of 10 ms with so many spans each, and 1 ms of the optimizer after each; `late` ones take longer."""
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        for number in range(spans):
            recorder.add("F", step, number, clock.now, clock.now)
        clock.now += late.get(step, 0.010)
        recorder.end_step()
        recorder.add("optimizer", step, -1, clock.now, clock.now + 0.001)
        clock.now += 0.001
    recorder.close()


def kept(folder: Path, kind: str) -> list[int]:
    return [span.step for span in read_recording(folder).timeline.spans if span.kind == kind]


def test_first_ones_some_later_and_outliers_are_kept(tmp_path: Path, clock: SimpleNamespace):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.detail = parse_detail("first 20, every 10, 33-35, outliers")
    run_steps(recorder, clock, 200, 3, {2: 1.0, 57: 0.05, 101: 0.0151, 102: 0.014})
    spread = [22, 38, 44, 50, 67, 73, 89, 95, 101, 117, 124, 130, 146, 152, 168, 175, 181, 197]
    expected = sorted({*range(1, 21), *range(33, 36), 57, *spread})
    assert kept(tmp_path, "step") == kept(tmp_path, "optimizer") == expected
    assert len(kept(tmp_path, "F")) == 3 * len(expected)


def test_without_outliers_slow_steps_are_forgotten(tmp_path: Path, clock: SimpleNamespace):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.detail = parse_detail("every 10")
    run_steps(recorder, clock, 60, 3, {57: 0.05})
    assert kept(tmp_path, "step") == [16, 22, 38, 44, 50]


@pytest.mark.parametrize("every", [1, 2, 3, 7, 10, 64, 100])
@pytest.mark.parametrize("period", [1, 2, 5, 10, 50, 100, 128])
def test_what_is_kept_meets_no_period_of_a_script(every: int, period: int):
    """Of the steps on which a script saves as large a share is kept as of all."""
    detail = Detail(every=every)
    steps = range(1, 400 * every * period // math.gcd(every, period) + 1)
    kept_ones = [step for step in steps if detail.keeps(step, 0)]
    assert len(kept_ones) == pytest.approx(len(steps) / every, abs=2)
    met = sum(step % period == 0 for step in kept_ones)
    assert met == pytest.approx(len(kept_ones) / period, rel=0.25)


def test_what_waits_in_memory_is_limited(tmp_path: Path, clock: SimpleNamespace, monkeypatch):
    monkeypatch.setattr(recorder_module, "MOST_HELD", 100)
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder._block = 10
    recorder.detail = parse_detail("none")
    recorder.begin_step(1)
    for _ in range(1000):
        recorder.add("F", 1, 0, 0.0, 1.0)
    assert len(recorder._spans) == 100


@pytest.mark.parametrize("spans", [64, 2000])
def test_a_hundred_thousand_steps_stay_below_50_mb(spans: int):
    detail = parse_detail(REPORT)
    written = 0
    for step in range(1, 100_001):
        keeps = detail.keeps(step, written)
        usual = detail.note(5.0 if step % 40 == 0 else 1.0)
        written += spans * RECORD.size if keeps or not usual else 0
    values = {"loss": 0.123456789, "gradient_norm": 12.3456789, "lr": 1e-4}
    longest = Step(
        99_999, 123456.7891234, *[0.1234567] * 6, 12, 4096, 123456789012, False, values, *[0.1234567] * 3
    )
    lines = 100_000 * (len(line_of(longest)) + 1)
    assert 0 < written <= SPANS_LIMIT_BYTES + spans * RECORD.size
    assert written + lines < 50e6


def test_a_full_recording_says_so_once_and_keeps_what_is_asked_for(caplog):
    detail = parse_detail("every 1, 50-60, outliers")
    with caplog.at_level(logging.WARNING):
        found = [step for step in range(40, 70) if detail.keeps(step, SPANS_LIMIT_BYTES)]
    assert found == list(range(50, 61))
    assert [record.getMessage() for record in caplog.records] == [
        "the recording has 28 MiB of spans: from step 40 on it keeps only what each step took, and the steps that are "
        "asked for by their numbers"
    ]


def test_what_a_text_asks_for():
    assert parse_detail("all").everything and EVERYTHING.keeps(10**9, 1 << 40)
    assert parse_detail(" first 3,outliers , 7-9") == Detail(first=3, ranges=((7, 9),), outliers=True)
    assert not any(parse_detail("none").keeps(step, 0) for step in range(1, 100))
    for text in ("", "first", "first x", "every 10 20-30", "1-", "-1-2", "9" * 20 + "-2", "some"):
        with pytest.raises(ConfigError, match="says not which steps: it must be all, none, or some of"):
            parse_detail(text)
        with pytest.raises(ConfigError, match="record_steps is"):
            resolve({"record_steps": text})
    assert resolve({"record_steps": REPORT}).record_steps == REPORT


def test_a_file_changes_the_detail_while_the_job_runs(tmp_path: Path, clock: SimpleNamespace):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.detail, recorder.control = parse_detail("first 2"), Control(tmp_path)
    path = tmp_path / NAME
    for step in range(1, 12):
        if step == 5:
            path.write_text(json.dumps({"record_steps": "6-7"}))
        recorder.begin_step(step)
        clock.now += 1.1
        recorder.end_step()
    recorder.close()
    assert kept(tmp_path, "step") == [1, 2, 6, 7]


def test_the_file_is_looked_at_once_a_second(tmp_path: Path):
    control = Control(tmp_path)
    assert control.look(0.0) is None
    (tmp_path / NAME).write_text('{"record_steps": "all"}')
    assert control.look(0.9) is None
    found = control.look(1.1)
    assert found is not None and found.everything
    assert control.look(5.0) is None, "it has not changed"
    os.remove(tmp_path / NAME)
    assert control.look(7.0) is None


def test_a_change_to_a_text_of_the_same_length_is_seen(tmp_path: Path):
    control, path = Control(tmp_path), tmp_path / NAME
    for at_s, steps in ((2.0, "6-7"), (4.0, "8-9")):
        path.write_text(json.dumps({"record_steps": steps}))
        os.utime(path, (at_s, at_s))  # as somebody writes it, and not as fast as a test
        assert control.look(at_s) == parse_detail(steps)


def test_a_file_of_an_earlier_job_does_not_count(tmp_path: Path):
    (tmp_path / NAME).write_text('{"record_steps": "all"}')
    assert Control(tmp_path).look(0.0) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "it is not JSON"),
        ("[]", "expected an object"),
        ('{"steps": "all"}', '"steps" is unknown here'),
        ('{"record_steps": 3}', "expected a string"),
        ('{"record_steps": "often"}', "'often' says not which steps"),
        ("\x00" * 100_000, "has more than 65536 bytes"),
    ],
)
def test_garbage_is_told_and_left_alone(tmp_path: Path, caplog, content: str, said: str):
    control = Control(tmp_path)
    (tmp_path / NAME).write_text(content)
    assert control.look(0.0) is None
    (record,) = caplog.records
    assert said in record.getMessage() and record.getMessage().endswith(
        'Write {"record_steps": "100-200"}, say'
    )
