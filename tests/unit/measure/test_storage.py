"""Readers read what there is, once, and are told of faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.errors import UsageError
from weft.measure import storage
from weft.measure.files import Held, files_of
from weft.measure.storage import measure, measure_all


@pytest.fixture
def files(tmp_path: Path) -> list[Held]:
    for number in range(40):
        (tmp_path / f"{number}.bin").write_bytes(bytes([number]) * (1000 + number))
    return files_of(tmp_path)


@pytest.mark.parametrize("pattern", ["in a row", "whole files"])
@pytest.mark.parametrize("readers", [1, 4])
def test_every_file_is_read_once(files: list[Held], pattern: str, readers: int):
    found = measure(files, pattern, readers, 60.0)
    assert found.read_bytes == sum(held.size for held in files)
    assert found.readers == readers and found.bytes_per_s > 0
    assert round(found.reads_per_s * found.seconds) == len(files)


def test_a_large_file_is_read_in_pieces(tmp_path: Path):
    size = 64 * storage.CHUNK * 2 + 5
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    found = measure(files_of(tmp_path), "whole files", 2, 60.0)
    assert found.read_bytes == size and round(found.reads_per_s * found.seconds) == 3


def test_records_are_a_quarter_of_the_data_and_within_it(tmp_path: Path, monkeypatch):
    (tmp_path / "table").write_bytes(bytes(64_000))
    seen: list[tuple[int, int]] = []
    pread = os.pread

    def look(descriptor: int, size: int, start: int) -> bytes:
        seen.append((start, size))
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", look)
    found = measure(files_of(tmp_path), "records", 1, 60.0, record=1000)
    assert found.read_bytes == 16_000 and len(seen) == 16
    assert all(0 <= start <= 63_000 and size == 1000 for start, size in seen)
    assert len(set(seen)) > 8, "at random"
    seen.clear()
    measure(files_of(tmp_path), "records", 1, 60.0, record=1000)
    first = list(seen)
    seen.clear()
    measure(files_of(tmp_path), "records", 1, 60.0, record=1000, seed=1)
    assert first != seen and len(first) == len(seen)


def test_the_time_ends_a_measurement(files: list[Held], monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(storage.time, "perf_counter", lambda: float(next(ticks)))
    found = measure(files, "whole files", 1, 20.0)
    assert 0 < round(found.reads_per_s * found.seconds) < len(files)


def test_a_file_that_goes_away_is_named(files: list[Held]):
    os.unlink(files[7].path)
    with pytest.raises(UsageError, match=r"\.bin: No such file"):
        measure(files, "whole files", 3, 60.0)


def test_all_measurements_and_the_best_once_more_from_memory(files: list[Held]):
    found = list(measure_all(files, [1, 2], 60.0, record=0, drop=False))
    assert [(rate.pattern, rate.readers) for rate in found[:-1]] == [
        ("in a row", 1), ("whole files", 1), ("whole files", 2),
    ]  # fmt: skip
    assert found[-1].state in ("warm", "unknown")


def test_fio_is_given_files_with_hostile_names_and_only_reads(tmp_path: Path):
    files = [Held("/data/a:b\\c", 10), Held("/data/$(rm -rf)", 20)]
    command = storage.fio_arguments(files, "in a row", 2, 1.5, 4096)
    assert "--filename=/data/$(rm -rf):/data/a\\:b\\\\c" in command
    assert "--readonly" in command and "--rw=read" in command and "--runtime=2" in command


@pytest.mark.parametrize("answer", ["", "{", '{"jobs": []}', '{"jobs": [{"read": {"bw_bytes": null}}]}'])
def test_an_answer_of_fio_that_makes_no_sense_is_none(tmp_path: Path, monkeypatch, answer: str):
    program = tmp_path / "fio"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (
        storage.has_fio() and storage.measure_by_fio([Held("/data/a", 10)], "in a row", 1, 1.0, 4096) is None
    )
    program.write_text('#!/bin/sh\necho \'note {"jobs": [{"read": {"bw_bytes": 5000}}]}\'\n')
    assert storage.measure_by_fio([Held("/data/a", 10)], "in a row", 1, 1.0, 4096) == ("in a row", 1, 5000.0)
