"""A recording that grows: what each look sees, and that none reads anything twice."""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import pytest

from tests.recordings import Recorded
from weft.analysis.run import Facts, Step
from weft.profiler.clock import Clock
from weft.profiler.facts import write_facts
from weft.profiler.format import HEADER_BYTES, RECORD, Header
from weft.profiler.live import following
from weft.profiler.live.following import FIRST_READ, KEEP_STEPS, Follower, Tail
from weft.profiler.recorder import Recorder, path_of
from weft.profiler.steps import END, Book, line_of
from weft.watch.process import host_name

CLOCK = b"c" * 16


def recorder(folder: Path, rank: int = 0, ranks: int = 1, offset_s: float = 0.0) -> Recorder:
    return Recorder(path_of(folder, rank), Header(rank, ranks, offset_s, CLOCK))


def add_step(file: Recorder, step: int) -> None:
    file.add("F", step, 0, step, step + 0.25)
    file.add("B", step, 0, step + 0.25, step + 0.5)
    file.add("step", step, -1, step, step + 0.75)


def line(step: int, **more: object) -> str:
    return line_of(Step(step, float(step), 0.5, **more)) + "\n"  # type: ignore[arg-type]


def numbers(follower: Follower, rank: int = 0) -> list[int]:
    return [step.step for step in follower.look().steps.get(rank, ())]


def test_steps_appear_as_they_are_written(tmp_path):
    follower, path = Follower(tmp_path / "out"), tmp_path / "out" / "rank0.steps.jsonl"
    assert follower.look().ranks == ()
    path.parent.mkdir()
    path.write_text(line(1) + line(2)[:-30])
    assert numbers(follower) == [1]
    with path.open("a") as file:
        file.write(line(2)[-30:] + line(3))
    assert numbers(follower) == [1, 2, 3] == numbers(follower)


def test_without_lines_steps_come_from_spans(tmp_path):
    file = recorder(tmp_path)
    add_step(file, 1)
    follower = Follower(tmp_path)
    (step,) = follower.look().steps[0]
    assert step == Step(1, 1.0, 0.75, work_s=0.5)
    add_step(file, 2)
    run = follower.look()
    assert [each.step for each in run.steps[0]] == [1, 2] and len(run.timeline.spans) == 6


def test_nothing_is_read_twice(tmp_path, monkeypatch):
    """What was read of the files is what they hold, and their first bytes again for each look."""
    file = recorder(tmp_path)
    follower, read = Follower(tmp_path), []
    opened = builtins.open

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def read(self, size):
            content = self.file.read(size)
            read.append(len(content))
            return content

    monkeypatch.setattr(following, "open", lambda *given: Counted(opened(*given)), raising=False)
    for step in range(1, 11):
        add_step(file, step)
        follower.look()
    records = 10 * 3 * RECORD.size
    firsts = [min(FIRST_READ, HEADER_BYTES + 3 * looks * RECORD.size) for looks in range(1, 11)]
    assert sum(read) == sum(firsts) + records


def test_a_long_recording_is_entered_near_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "FIRST_BYTES", 10 * RECORD.size + 7)
    file = recorder(tmp_path)
    for step in range(1, 101):
        add_step(file, step)
    (tmp_path / "rank0.steps.jsonl").write_text("".join(map(line, range(1, 101))))
    run = Follower(tmp_path).look()
    assert len(run.timeline.spans) == 11 and run.timeline.steps == (97, 98, 99, 100)
    found = [each.step for each in run.steps[0]]
    assert found == list(range(found[0], 101)) and 0 < len(found) < 20


def test_only_the_last_steps_are_kept(tmp_path):
    file, follower = recorder(tmp_path), Follower(tmp_path)
    (tmp_path / "rank0.steps.jsonl").write_text("".join(map(line, range(1, 501))))
    for step in range(1, 501):
        add_step(file, step)
    run = follower.look()
    assert run.timeline.steps == tuple(range(501 - KEEP_STEPS, 501)) and len(run.steps[0]) == KEEP_STEPS


@pytest.mark.parametrize("more", [0, 50])
def test_a_new_job_in_the_same_folder_begins_anew(tmp_path, more):
    """Also where its file is longer than the old one by then."""
    follower = Follower(tmp_path)
    file = recorder(tmp_path)
    for step in (1, 2, 3):
        add_step(file, step)
    assert follower.look().timeline.steps == (1, 2, 3)
    again = recorder(tmp_path, offset_s=7.0)
    for step in range(1, 2 + more):
        add_step(again, step)
    assert follower.look().timeline.steps == tuple(range(1, 2 + more))


def test_a_record_that_is_written_in_two_parts(tmp_path):
    path, whole = path_of(tmp_path, 0), tmp_path / "whole"
    whole.mkdir()
    file = recorder(whole)
    add_step(file, 1)
    content = path_of(whole, 0).read_bytes()
    path.write_bytes(content[:-20])
    follower = Follower(tmp_path)
    assert len(follower.look().timeline.spans) == 2
    with path.open("ab") as opened:
        opened.write(content[-20:])
    assert len(follower.look().timeline.spans) == 3


@pytest.mark.parametrize(
    "content", ["", "no json", "[1]", "{}", "\xff", "[" * 99999, '"5"', "[1, 2, 3, NaN]"]
)
def test_lines_that_are_none(tmp_path, content):
    (tmp_path / "rank0.steps.jsonl").write_text(f"{line(1)}{content}\n{line(2)}", encoding="latin-1")
    assert numbers(Follower(tmp_path)) == [1, 2]


def test_files_of_others_do_no_harm(tmp_path):
    for name in ("rank0.spans", "rank1.steps.jsonl", "rank2.facts.json", "rank99999999.spans", "rankx.spans"):
        (tmp_path / name).write_bytes(b"\xff{}[]\n" * 100)
    (tmp_path / "rank3.spans").mkdir()
    for name in ("rank4.spans", "rank4.steps.jsonl", "rank4.facts.json"):
        os.mkfifo(tmp_path / name)
    run = Follower(tmp_path).look()
    assert not any(run.steps.values()) and not run.timeline.spans and not run.complete


def facts(folder: Path, rank: int, **more: object) -> None:
    write_facts(folder, Facts(rank, 2, **more), Clock(CLOCK, 0.0))  # type: ignore[arg-type]


def test_a_run_is_complete_when_all_ranks_say_so_or_are_gone(tmp_path):
    alive = {11, 12}
    follower = Follower(tmp_path, alive.__contains__)
    here = host_name()
    facts(tmp_path, 0, pid=11, host=here)
    assert not follower.look().complete
    facts(tmp_path, 1, pid=12, host="elsewhere", limit_bytes=1 << 30)
    assert not follower.look().complete and follower.look().facts[1].limit_bytes == 1 << 30
    alive.remove(11)
    assert not follower.look().complete
    (tmp_path / "rank1.steps.jsonl").write_text(line(1) + END + "\n")
    assert follower.look().complete


def test_a_process_of_another_host_is_not_looked_for_here(tmp_path):
    for rank in (0, 1):
        facts(tmp_path, rank, pid=11, host="elsewhere")
    assert not Follower(tmp_path, lambda pid: False).look().complete


def test_a_tail_of_nothing(tmp_path):
    assert Tail(tmp_path / "none").more() == (b"", b"") == Tail(tmp_path).more()


def test_a_made_run_is_seen_as_it_was_made(tmp_path):
    run = Recorded(partitions=2, microbatches=4, steps=5).run()
    for rank in run.ranks:
        file = recorder(tmp_path, rank, 2)
        for span in run.timeline.of_rank(rank):
            file.add(
                span.kind, span.step, span.microbatch, span.start_s, span.end_s, span.peer, stage=span.stage
            )
        file.close()
    found = Follower(tmp_path).look()
    assert [span.kind for span in found.timeline.spans] == [span.kind for span in run.timeline.spans]
    for rank in run.ranks:
        for seen, made in zip(found.steps[rank], run.steps[rank], strict=True):
            assert seen.work_s == pytest.approx(made.work_s) and seen.start_s == made.start_s


def test_the_lines_of_another_job_are_told_apart_however_long_they_are(tmp_path):
    follower, clock = Follower(tmp_path), Clock(CLOCK, 1795664663.7)
    for job in (1, 2):
        book = Book.open(tmp_path, 0, 1, clock._replace(offset_s=clock.offset_s + job / 1e3))
        for step in range(10 * job):
            book.file.write(line(step).rstrip())
        book.close()
        assert numbers(follower) == [*range(10 * job)]
