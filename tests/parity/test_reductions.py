"""Sums and averages over real processes; see ``reductions.py`` and ``broken_reductions.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import long, some_of

from .jobs import ROOT, pass_checks
from .reductions import CHECKS

HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


@pytest.mark.parametrize("layouts", some_of(4, [(4, [*CHECKS]), (3, [*CHECKS])]), ids=["some", "all"])
def test_algorithms_and_compressions_equal_brute_force(layouts: list[tuple[int, list[str]]]):
    for ranks, checks in layouts:
        pass_checks("reductions.py", checks, ranks, timeout=500)


@long
def test_the_loss_is_that_of_single_precision():
    options = ["--steps", "60", "--seeds", "0"]
    done = run_ranks(
        2, ROOT / "benchmarks" / "loss_parity" / "train.py", options, env=PATHS, timeout=500, warm=True
    ).check()
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    losses = {(row["task"], row["compression"]): row["loss"] for row in rows}
    assert len(losses) == 8
    for (task, spec), loss in losses.items():
        assert loss == pytest.approx(losses[task, "fp32"], rel=0.01), (task, spec, losses)


def test_a_rank_that_is_missing_dead_or_different_is_named(tmp_path: Path):
    segments = sorted(os.listdir("/dev/shm"))
    command = [sys.executable, str(HERE / "broken_reductions.py"), str(tmp_path / "store")]
    environ = {**os.environ, **PATHS, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environ, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    try:
        out = ranks[0].communicate(timeout=400)[0].splitlines()
        ranks[1].communicate(timeout=200)
    finally:
        for each in ranks:
            each.kill()
    assert out[0] == (
        "DivergenceError: rank 0 adds up 1000 values of torch.float32 where rank 1 has 1001 of torch.float32: every "
        "rank must make the same calls"
    )
    assert out[1].startswith("StallError: rank 0 waited ")
    assert "for rank 1 in a sum in shared memory: see what that rank does" in out[1]
    assert out[2].startswith(
        "PeerError: rank 1 failed: its process ended before it had done its part of a sum"
    )
    assert sorted(os.listdir("/dev/shm")) == segments
