"""A rank that fails while a Keras model trains ends the job: the culprit comes first, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.launching import run_ranks  # noqa: E402
from tests.long import long, one_in  # noqa: E402

WORKER = Path(__file__).parent / "workers" / "keras_step.py"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
CASES = {
    "kill": "weft: rank 1 on {host} (pid {pid}) was killed by SIGKILL in step 4",
    "layer": "this layer has had enough",
    "script": "RuntimeError: a fault in the script",
    "graphs": "DivergenceError: the ranks have traced different steps: operation",
    "batch": "DivergenceError: in step 4 the ranks were called differently: input.step is",
    "data": 'DivergenceError: in step 4 the ranks were called differently: input.some values in x is "',
}


@pytest.mark.parametrize("what", one_in(3, CASES))
def test_the_culprit_comes_first(what: str) -> None:
    done = run_ranks(2, WORKER, [what], env=QUIET, timeout=120)
    assert done.returncode != 0
    first = next(line for line in done.stderr.splitlines() if line.startswith("weft: rank"))
    wanted = CASES[what].partition("{")[0]
    assert wanted in first, done.stderr
    assert "trained" not in done.stdout
    if what in ("kill", "layer", "script"):
        assert first.startswith("weft: rank 1"), first


@long
def test_a_slow_rank_is_waited_for() -> None:
    done = run_ranks(2, WORKER, ["slow"], env=QUIET, timeout=120).check()
    assert done.stdout.count("trained") == 2
