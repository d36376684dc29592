"""Jobs of TensorFlow that are saved and resumed, on as many ranks or others; whole models in plain TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

from tests.launching import ROOT, SOURCE, _environ, run_ranks  # noqa: E402
from tests.long import long, one_in  # noqa: E402
from tests.parity.tensorflow.jobs import WARM  # noqa: E402

JOB = Path(__file__).with_name("saves.py")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)])}


def run_job(ranks: int, action: str, folder: Path) -> list[Any]:
    """What each rank tells."""
    run_ranks(ranks, JOB, [action, str(folder)], env=QUIET, warm=WARM).check()
    return [json.loads((folder / f"{action}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def first(folder):
    """The run that was not interrupted."""
    return run_job(2, "first", folder)


@pytest.fixture(scope="module")
def second(folder, first):
    return run_job(2, "second", folder)


@pytest.mark.parametrize("way", ["manager", "tag", "beside"])
def test_a_restore_goes_on_bit_for_bit(first, way):
    assert first[0]["losses"] == first[1]["losses"]
    assert len(set(first[0]["losses"])) == 2
    assert all(rank["again"][way] == rank["losses"] for rank in first)


def test_counters_come_back_and_old_saves_go(first, folder):
    assert [rank["counted"] for rank in first] == [4.0, 4.0]
    assert not (folder / "numbered" / "ckpt-1_partial").exists()
    assert all(rank["checkpoints"] == [str(folder / "numbered" / "ckpt-2")] for rank in first)  # 3 is damaged


def test_each_rank_keeps_its_own_variables_only(first):
    assert first[0]["here"] and first[1]["here"]
    assert not set(first[0]["here"]) & set(first[1]["here"])


@long
def test_another_job_goes_on_bit_for_bit(first, second):
    assert (
        "sequential/dense/kernel" in first[0]["here"] and "sequential/dense/kernel" not in second[0]["names"]
    )
    for rank in second:
        assert rank["losses"] == first[0]["losses"] and rank["iterations"] == 4


@pytest.mark.parametrize("ranks", one_in(2, [4, 1]))
def test_other_numbers_of_ranks_go_on(first, folder, ranks):
    for rank in run_job(ranks, "second", folder):
        np.testing.assert_allclose(rank["losses"], first[0]["losses"], rtol=1e-6)
        assert rank["iterations"] == 4


@long
def test_exports_predict_the_same_without_weft(first, second, folder):
    command = [sys.executable, str(JOB.with_name("plain.py")), str(folder)]
    done = subprocess.run(command, env=_environ(QUIET), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("keras", "layer", "saved_model"):
        np.testing.assert_allclose(found[name], first[0]["predicted"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        found["own"], json.loads((folder / "own.json").read_text()), rtol=1e-5, atol=1e-6
    )


def test_torch_reads_the_variables_and_refuses_to_go_on(first, folder):
    from weft.torch.checkpoint.export import read_model

    state = read_model(folder / "saves")
    assert state["sequential/dense/kernel"].shape == (6, 16)
    assert set(state) == {name for rank in first for name in rank["here"]}


@long
def test_what_is_read_before_the_first_step_is_right_or_refused(tmp_path):
    """A script that was started again once got an optimizer's zeros in silence, and lost its loss scale."""
    told = {}
    for action in ("write", "read"):
        run_ranks(2, JOB.with_name("early_reads.py"), [action, str(tmp_path)], env=QUIET, warm=WARM).check()
        told[action] = [json.loads((tmp_path / f"{action}-{rank}.json").read_text()) for rank in (0, 1)]
    assert told["read"] == told["write"]
