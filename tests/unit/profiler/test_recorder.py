"""What is recorded arrives in the file, whatever becomes of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.profiler import recorder as recorder_module
from weft.profiler.clock import clock_identity, clock_offset_s
from weft.profiler.detail import parse_detail
from weft.profiler.format import CONTENTS, HEADER_BYTES, RECORD
from weft.profiler.reading import read_recording
from weft.profiler.recorder import Recorder, path_of
from weft.timeline import KINDS, Span

records = st.tuples(
    st.sampled_from(KINDS),
    st.integers(-1, 2**31 - 1),
    st.integers(-1, 2**31 - 1),
    st.floats(0, 1e6),
    st.floats(0, 100),
    st.integers(-1, 2**15 - 1),
    st.sampled_from(CONTENTS),
    st.integers(-1, 2**15 - 1),
)


def size_of(folder: Path, rank: int = 0) -> int:
    """How many records the file of a rank holds."""
    return (path_of(folder, rank).stat().st_size - HEADER_BYTES) // RECORD.size


@settings(deadline=None)
@given(st.lists(records, min_size=1, max_size=12), st.integers(1, 5))
def test_what_was_recorded_is_read_back(drawn, block):
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder.open(Path(folder), 0, 1)
        recorder._block = block
        for kind, step, microbatch, start, length, peer, what, stage in drawn:
            recorder.add(kind, step, microbatch, start, start + length, peer, what, stage)
        recorder.close()
        recording = read_recording(Path(folder))
    assert recording.warnings == ()
    first = min(start for _, _, _, start, *_ in drawn)
    expected = sorted(
        (kind, step, microbatch, stage, round(start - first, 6), round(start + length - first, 6))
        for kind, step, microbatch, start, length, _, _, stage in drawn
    )
    assert expected == sorted(
        (span.kind, span.step, span.microbatch, span.stage, round(span.start_s, 6), round(span.end_s, 6))
        for span in recording.timeline.spans
    )


def test_labels_tell_the_other_rank_and_what_was_sent(tmp_path: Path):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.add("send", 1, 0, 0.0, 1.0, 3, "value")
    recorder.add("recv", 1, 0, 1.0, 2.0, 3, "gradient")
    recorder.add("wait", 1, 0, 2.0, 3.0, 3)
    recorder.add("F", 1, 0, 3.0, 4.0)
    recorder.close()
    labels = [span.label for span in read_recording(tmp_path).timeline.spans]
    assert labels == ["value to rank 3", "gradient from rank 3", "for rank 3", ""]


def test_a_full_block_and_the_end_of_a_step_are_written_at_once(tmp_path: Path):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder._block = 4
    sizes = []
    for kind in ("F", "F", "F", "F", "F", "step", "F"):
        recorder.add(kind, 1, 0, 0.0, 1.0)
        sizes.append(size_of(tmp_path))
    assert sizes == [0, 0, 0, 4, 4, 6, 6]
    recorder.flush()
    assert size_of(tmp_path) == 7
    recorder.close()
    recorder.close()
    recorder.add("step", 1, 0, 0.0, 1.0)
    assert size_of(tmp_path) == 7, "what comes after the end is dropped"


def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from weft.profiler.recorder import Recorder
        recorder = Recorder.open(Path(sys.argv[1]), 0, 1)
        for step in range(3):
            recorder.add("F", step, 0, step, step + 0.5)
            recorder.add("step", step, -1, step, step + 1)
        recorder.add("F", 3, 0, 3, 3.5)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    recording = read_recording(tmp_path)
    assert recording.warnings == () and recording.timeline.steps == (0, 1, 2)
    assert len(recording.timeline.spans) == 6


def test_threads_record_at_once(tmp_path: Path):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder._block = 16

    def record(number: int) -> None:
        for index in range(1000):
            recorder.add("step" if index % 100 == 99 else "send", number, index, index, index + 1.0)

    threads = [threading.Thread(target=record, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    found = sorted((span.step, span.microbatch) for span in read_recording(tmp_path).timeline.spans)
    assert found == [(number, index) for number in range(4) for index in range(1000)]


def test_a_recording_replaces_the_one_before(tmp_path: Path):
    for rank in range(3):
        Recorder.open(tmp_path, rank, 3).close()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "rankled.spans").touch()
    Recorder.open(tmp_path, 0, 2).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "rank0.spans", "rank1.spans", "rankled.spans"]


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch, caplog):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.add("step", 1, 0, 0.0, 1.0)
    write, calls = os.write, []

    def full(file: int, content: bytes) -> int:
        calls.append(len(content))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(file, content[: RECORD.size + 5])

    monkeypatch.setattr(recorder_module.os, "write", full)
    for _ in range(3):
        recorder.add("F", 2, 0, 0.0, 1.0)
    recorder.add("step", 2, 0, 0.0, 1.0)
    recorder.add("step", 3, 0, 0.0, 1.0)
    recorder.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"the recording ends here: {path_of(tmp_path, 0)} cannot be written: No space left on device"
    ]
    monkeypatch.undo()
    recording = read_recording(tmp_path)
    assert recording.warnings == () and recording.timeline.steps == (1,)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r'"record" names a folder where nothing can be written: .*file: '):
        Recorder.open(tmp_path / "file", 0, 1)
    (tmp_path / "folder" / "rank0.spans").mkdir(parents=True)
    with pytest.raises(
        UsageError, match="rank0.spans: Is a directory; name another one, for example weft run"
    ):
        Recorder.open(tmp_path / "folder", 0, 1)


def test_the_clock():
    before = time.time()
    now = time.perf_counter() + clock_offset_s()
    assert before - 0.1 <= now <= time.time() + 0.1
    assert len(clock_identity()) == 16 and clock_identity() == clock_identity()


def test_the_clock_of_a_system_without_proc(monkeypatch):
    def missing(path: Path) -> bytes:
        raise FileNotFoundError(path)

    boot = clock_identity()
    monkeypatch.setattr(Path, "read_bytes", missing)
    assert len(clock_identity()) == 16 and clock_identity() == clock_identity() != boot


def test_kinds_and_records_have_the_size_that_the_format_tells():
    assert RECORD.size == 32 and HEADER_BYTES == 64
    assert len(KINDS) < 256 and Span(0, KINDS[0], 0, 0.0, 1.0).step == -1


def recorded(folder: Path) -> list[tuple[str, int]]:
    return [(span.kind, span.step) for span in read_recording(folder).timeline.spans if span.kind != "step"]


def test_what_belongs_to_the_next_step_is_kept_with_it(tmp_path: Path):
    recorder = Recorder.open(tmp_path, 0, 1)
    recorder.detail = parse_detail("2-2")
    for step in (1, 2, 3):
        recorder.add("prepare", step, -1, step, step + 0.1)
        recorder.begin_step(step)
        recorder.add("F", step, 0, step + 0.2, step + 0.3)
        recorder.end_step()
    recorder.close()
    assert ("prepare", 2) in recorded(tmp_path) and ("F", 2) in recorded(tmp_path)
    assert not {("F", 1), ("F", 3), ("prepare", 1)} & {*recorded(tmp_path)}
