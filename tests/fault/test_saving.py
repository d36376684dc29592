"""Faults while ranks save: the last good checkpoint stays, nobody waits for ever, and the culprit is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import processes_left, run_ranks, started
from weft.checkpoint.find import faults, in_order

JOB = Path(__file__).parent / "workers" / "saving.py"


@pytest.mark.parametrize(
    "what, text", [("gate", "went on without it"), ("late", "has come to its end without it")]
)
def test_a_save_that_one_rank_calls_is_named(tmp_path, what, text):
    with started(2, JOB, [what, str(tmp_path)]) as job:
        done = job.wait(60)
        assert processes_left(job.mark) == []
    assert done.returncode != 0
    first = done.stderr.partition("\n")[0]
    assert "UsageError: save_checkpoint(tag='bad') was called by rank 0 only: rank 1 " in first, done.stderr
    assert text in first and "rdp_rank() == 0" in first
    assert (tmp_path / "newest").read_text() == "good\n"


def test_a_rank_killed_as_it_saves_leaves_the_earlier_save(tmp_path):
    done = run_ranks(2, JOB, ["kill", str(tmp_path)], timeout=300)
    assert done.returncode != 0 and "rank 1" in done.stderr and "SIGKILL" in done.stderr, done.stderr
    (save,) = in_order(tmp_path, None)
    assert save.tag == "good" and save.index is not None and faults(save.folder, save.index) == []
    assert json.loads((save.folder / "index.json").read_text())["content"]["user"] == 1


def test_a_process_killed_anywhere_in_a_save(tmp_path):
    command = [sys.executable, str(JOB), "phases", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert "passed" in done.stdout, done.stderr
