"""Copies of a pipeline on different data train as one process on the whole batch; see `replicas.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.launching import run_ranks

from .jobs import ROOT

JOB = Path(__file__).parent / "replicas.py"


@pytest.mark.parametrize("placement", ["cluster", "spread"])
def test_two_replicas_of_two_partitions(placement: str):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = run_ranks(
        4, JOB, ["--placement", placement], env={"PYTHONPATH": path}, timeout=400, warm=True
    ).check()
    assert done.stdout.count("passed") == 4
