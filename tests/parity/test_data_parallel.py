"""Replicas of a whole model train as PyTorch's DDP does; see `data_parallel.py`, which runs all checks in one job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import one_in

from .data_parallel import CHECKS
from .jobs import ROOT, pass_checks

PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("ranks", "algorithm"), one_in(3, [(2, "shared"), (2, "direct"), (4, "shared")]))
def test_replicas_train_as_ddp(ranks: int, algorithm: str):
    env = {"WEFT_CONFIG": json.dumps({"all_reduce": algorithm})}
    pass_checks("data_parallel.py", CHECKS, ranks, env=env, timeout=800)


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    one_in(3, [("weft", ["weft"]), ("torchrun", ["smddp", "short"]), ("mpirun", ["weft", "short"])]),
)
def test_scripts_for_ddp_run_on_the_backend(launcher: str, arguments: list[str]):
    job = Path(__file__).parent / "backend.py"
    warm = launcher == "weft"
    done = run_ranks(2, job, arguments, env=PATH, timeout=400, launcher=launcher, warm=warm).check()
    assert done.stdout.count("passed") == 2
