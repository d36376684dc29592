"""Faults while ranks save: the last good checkpoint stays, nobody waits for ever, and the culprit is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import FOREIGN, SOURCE, processes_left, run_ranks, run_script, started
from tests.long import long, one_in
from weft.checkpoint.find import faults, in_order

JOB = Path(__file__).parent / "workers" / "saving.py"


def test_a_save_that_one_rank_calls_is_named(tmp_path):
    with started(2, JOB, ["gate", str(tmp_path)], warm=True) as job:
        done = job.wait(60)
        assert processes_left(job.mark) == []
    assert done.returncode != 0
    first = done.stderr.partition("\n")[0]
    assert "UsageError: save_checkpoint(tag='bad') was called by rank 0 only: rank 1 " in first, done.stderr
    assert "went on without it" in first and "rdp_rank() == 0" in first
    assert (tmp_path / "newest").read_text() == "good\n"


@pytest.mark.parametrize("launcher", one_in(2, ["weft", "torchrun"]))
@pytest.mark.parametrize("end", ["last", "leave"])
def test_a_last_save_that_fails_is_an_error_of_the_job(tmp_path, end, launcher):
    done = run_ranks(2, JOB, [end, str(tmp_path)], timeout=120, launcher=launcher, warm=launcher == "weft")
    assert done.returncode != 0
    first = next(line for line in done.stderr.splitlines() if line.startswith("weft: "))
    assert (
        "failed in step 1, collective of the last save: CheckpointError: bad was not saved: the disk of"
        in first
    ), done.stderr
    if launcher == "weft":
        assert done.stderr.startswith(first), done.stderr
    assert (tmp_path / "newest").read_text() == "good\n"


def test_a_last_save_that_fails_ends_a_single_process(tmp_path):
    alone = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [sys.executable, JOB, "last", tmp_path], capture_output=True, text=True, timeout=240,
        env={**alone, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 1
    assert "CheckpointError: bad was not saved: the disk of" in done.stderr.partition("\n")[0], done.stderr


def test_a_rank_killed_as_it_saves_leaves_the_earlier_save(tmp_path):
    done = run_ranks(2, JOB, ["kill", str(tmp_path)], timeout=300, warm=True)
    assert done.returncode != 0 and "rank 1" in done.stderr and "SIGKILL" in done.stderr, done.stderr
    (save,) = in_order(tmp_path, None)
    assert save.tag == "good" and save.index is not None and faults(save.folder, save.index) == []
    assert json.loads((save.folder / "index.json").read_text())["content"]["user"] == 1


@long
@pytest.mark.timeout(900)
def test_ranks_killed_anywhere_in_a_save(tmp_path):
    told = run_script(JOB.parent / "killed_saves.py", str(tmp_path))
    assert told.count("rank ") == 2 * (13 + 5) + 50


@long
@pytest.mark.timeout(900)
def test_saves_that_not_all_ranks_call_alike(tmp_path):
    run_script(JOB.parent / "wrong_gates.py", str(tmp_path))
