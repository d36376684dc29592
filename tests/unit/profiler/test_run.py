"""All that a job recorded, read back from whatever is left of it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.analysis.run import Device, Facts, Sample, Step, Unit
from weft.errors import FormatError
from weft.plan.measured.planned import Part, Planned
from weft.profiler.clock import Clock
from weft.profiler.facts import facts_path, process_start_s, write_facts
from weft.profiler.reading import read_run
from weft.profiler.recorder import Recorder
from weft.profiler.samples import line_of, open_samples, samples_path
from weft.profiler.steps import Book, step_of, steps_path
from weft.profiler.steps import line_of as step_line

HERE, THERE = Clock(b"h" * 16, 5000.0), Clock(b"t" * 16, 5091.0)
FACTS = Facts(
    0, 2, "node", 7, 0, 0, "cpu", 99.0, 100.0, 1 << 30, 2, {"partitions": 2}, (Unit("a", 0, 0.1, 0.2, 8),),
    {"weft": "1"}, 64, Planned(0.5, (Part(0.125, 0.25, 1 << 20), Part(0.25, 0.125))),
)  # fmt: skip


def record(folder: Path, rank: int, clock: Clock = HERE, steps: int = 3, at_s: float = 100.0) -> None:
    """A rank's files: steps of a second each, of which it works for a half."""
    recorder = Recorder.open(folder, rank, 2, clock)
    recorder.book = Book.open(folder, rank, 2, clock)
    used = itertools.count()
    recorder.book.cpu_s = lambda: 0.125 * next(used)  # an eighth of a second in each step, and after it
    write_facts(folder, replace(FACTS, rank=rank, start_s=at_s - 1, joined_s=at_s), clock)
    for step in range(1, steps + 1):
        start_s = at_s + step
        recorder.add("data", step - 1 or -1, -1, start_s - 0.25, start_s)
        recorder.book.begin(step, start_s, False, recorder.book.spent())
        recorder.add("F", step, 0, start_s, start_s + 0.5)
        recorder.book.end(start_s + 0.5, 32, 1000, recorder.book.spent())
        recorder.add("step", step, -1, start_s, start_s + 0.5)
        recorder.add("optimizer", step, -1, start_s + 0.5, start_s + 0.625)
        recorder.add("collector", step, -1, start_s + 0.25, start_s + 0.3125)
        recorder.add("checkpoint", step, -1, start_s + 0.625, start_s + 0.6875)
        recorder.note({"loss": 1.0 / step, "name": "text", "bad": math.nan})
    recorder.close()


def test_what_was_recorded_is_read_back(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    file = open_samples(tmp_path, "node/1", HERE)
    sample = Sample(
        101.0, (0.5, 1.0), 0.25, 3, 4, 5, 6.5, 7.0, 8.0, 9.0, 0.5, 2, 0.125, 0.25, (Device(0.5, 1, 2, throttled=True),)
    )  # fmt: skip
    file.write(line_of(sample))
    run = read_run(tmp_path)
    assert run.warnings == () and run.complete and run.ranks == (0, 1) and run.name == tmp_path.name
    first = run.steps[0][0]
    assert first.values["loss"] == 1.0 and math.isnan(first.values["bad"]) and "name" not in first.values
    assert replace(first, preempted=0, values={}) == Step(
        1, 0.25, 0.5, data_s=0.25, optimizer_s=0.125, work_s=0.5, cpu_s=0.125, samples=32, memory_bytes=1000,
        checkpoint_s=0.0625, collector_s=0.0625, between_cpu_s=0.125,
    )  # fmt: skip
    assert run.steps[0][-1].between_cpu_s == 0.0, "nothing came after it"
    assert [step.step for step in run.steps[1]] == [1, 2, 3]
    assert run.facts[0] == replace(FACTS, start_s=99.0 - 100.75, joined_s=100.0 - 100.75)
    (found,) = run.samples["node/1"]
    assert repr(found) == repr(replace(sample, at_s=101.0 - 100.75))
    assert run.timeline.start_s == 0.0 and run.timeline.steps == (1, 2, 3)


def test_lines_of_earlier_versions_end_with_the_values():
    made = Step(3, 1.0, 0.5, values={"loss": 2.0}, checkpoint_s=0.25, collector_s=0.5, between_cpu_s=0.75)
    line = json.loads(step_line(made))
    assert step_of(line) == made
    assert step_of(line[:13]) == replace(made, checkpoint_s=0.0, collector_s=0.0, between_cpu_s=0.0)
    for wrong in (
        line[:12],
        line[:14],
        [*line, 0],
        [*line[:13], -1, 0, 0],
        [*line[:13], 0, "0", 0],
        [*line[:13], 0, 0, 1e300],
    ):
        assert step_of(wrong) is None


def test_hosts_meet_on_the_wall_clock(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1, THERE, at_s=9.5)
    run = read_run(tmp_path)
    assert run.steps[1][0].start_s - run.steps[0][0].start_s == pytest.approx(0.5)
    assert run.facts[1].joined_s - run.facts[0].joined_s == pytest.approx(0.5)


def test_a_rank_that_is_missing_is_told(tmp_path: Path):
    record(tmp_path, 1)
    run = read_run(tmp_path)
    assert run.ranks == (1,) and not run.complete
    assert any("rank 0" in warning for warning in run.warnings), run.warnings


def test_a_run_without_spans(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    for name in tmp_path.glob("*.spans"):
        name.unlink()
    run = read_run(tmp_path)
    assert run.timeline.spans == () and run.steps[0][0].start_s == 0.0 and run.complete


def test_nothing_at_all(tmp_path: Path):
    with pytest.raises(FormatError, match="holds no recording that can be read: there is none of rank"):
        read_run(tmp_path)
    with pytest.raises(FormatError, match="there is no folder"):
        read_run(tmp_path / "nowhere")


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["steps", "facts", "samples"]), st.floats(0, 1), st.binary(max_size=3))
def test_files_cut_or_damaged_give_the_rest(tmp_path_factory, which, where, put):
    folder = tmp_path_factory.mktemp("run")
    record(folder, 0)
    record(folder, 1)
    open_samples(folder, "node", HERE).write(line_of(Sample(101.0, (0.5,))))
    path = {
        "steps": steps_path(folder, 1), "facts": facts_path(folder, 1), "samples": samples_path(folder, "node"),
    }[which]  # fmt: skip
    content = path.read_bytes()
    at = int(where * len(content))
    path.write_bytes(content[:at] + put)
    run = read_run(folder)
    assert len(run.steps[0]) == 3
    found = [step.step for step in run.steps.get(1, ())]
    assert found == [1, 2, 3][: len(found)]


def test_a_cut_line_is_told(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    path = steps_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-20])
    run = read_run(tmp_path)
    assert [step.step for step in run.steps[0]] == [1, 2] and not run.complete
    assert run.warnings == (f"{path} ends in the middle of a line: the rank died, or the file was cut",)


def test_lines_that_are_no_steps(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    path = steps_path(tmp_path, 0)
    lines = path.read_text().splitlines()
    nan = lines[1].replace("0.5", "NaN", 1)
    path.write_text(
        "\n".join([*lines[:2], "[]", '{"a": 1}', nan, "[1, 2", lines[1].replace("32", '"x"', 1), *lines[2:]])
    )
    run = read_run(tmp_path)
    assert [step.step for step in run.steps[0]] == [1, 2, 3] and len(run.warnings) == 2


def test_files_of_an_earlier_job_with_more_ranks_go(tmp_path: Path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    Recorder.open(tmp_path, 0, 1).close()
    assert not any("rank1" in path.name for path in tmp_path.iterdir())


def test_the_start_of_the_process():
    import time

    assert 0.0 <= time.perf_counter() - process_start_s() < 3600.0
