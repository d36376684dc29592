"""A few of the runs of `make random-faults`, the same ones each time."""

from __future__ import annotations

import shutil

import pytest

from tests.fault.campaign import Run, strike

RUNS = [
    Run("pipeline of 2", "rank", "SIGKILL", 1, "save", 0.01, True),
    Run("2 replicas", "rank", "SIGSTOP", 0, "train", 0.05, True),
    Run("pipeline of 2", "rank", "SIGTERM", 0, "init", 0.0, True),
    Run("2 x 2", "launcher", "SIGKILL", 3, "trace", 0.02, True),
    Run("2 replicas", "launcher", "SIGINT", 1, "shutdown", 0.0, True),
    Run("pipeline of 2", "launcher", "SIGKILL", 0, "import", 0.3, False),
    Run("pipeline of 4", "rank", "SIGINT", 1, "init", 0.047, False, "mpirun"),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_signal_at_a_random_moment(run: Run):
    if run.launcher != "weft" and shutil.which(run.launcher) is None:
        pytest.skip(f"{run.launcher} is not installed")
    strike(run)
