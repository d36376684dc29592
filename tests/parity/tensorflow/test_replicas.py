"""Replicas compute what one process computes with the whole batch; scripts for smdistributed run unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks

pytest.importorskip("tensorflow")

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"


def results(n, script, *args, options=()):
    """What each rank and kind of training told, and all that was written."""
    done = run_ranks(n, script, args, timeout=300, options=options).check()
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines], done.stdout


def like_public(n, script, *args, options=()):
    return results(n, SCRIPTS / script, *args, options=["--device", "cpu", "--smdistributed", *options])[0]


def close(one, other, tolerance=1e-5):
    return one == pytest.approx(other, rel=tolerance, abs=1e-6)


def test_replicas_train_as_one_process_does():
    alone = {style: told for (_, style, *told) in results(1, HERE / "replicas.py")[0]}
    assert alone.keys() == {"tape0", "tape1", "optimizer1", "allreduce1"}
    (losses, weights) = alone["tape1"]
    found, written = results(2, HERE / "replicas.py")
    assert written.count("passed\n") == 2
    assert len(found) == 2 * 5
    for _, style, here, weights_here in found:
        tolerance = 1e-3 if style == "fp16" else 1e-5
        assert close(here, losses, tolerance) and close(weights_here, weights, tolerance), style
        if style != "fp16":
            assert close(here, alone[style][0])


def test_a_script_for_data_parallelism():
    ((rank, size, losses, weights),) = like_public(1, "mnist_dp.py")
    assert (rank, size) == (0, 1) and losses[-1] < 0.7 * losses[0]
    split = like_public(2, "mnist_dp.py")
    assert sorted(told[:2] for told in split) == [[0, 2], [1, 2]]
    for _, _, here, weights_here in split:
        assert close(here, losses) and close(weights_here, weights)


def test_scripts_for_model_parallelism():
    ((*_, losses, mean),) = like_public(1, "mnist_mp.py")
    assert losses[-1] < 0.3 * losses[0]
    split = like_public(2, "mnist_mp.py", "--gradients", "tape", "get_gradients")
    assert sorted((rank, kind) for rank, _, kind, *_ in split) == [
        (rank, kind) for rank in (0, 1) for kind in ("get_gradients", "tape")
    ]
    for _, _, _, here, mean_here in split:
        assert close(here, losses) and close(mean_here, mean)
    four = like_public(4, "mnist_mp.py", "--horovod", "1", options=["--set", "partitions=2"])
    assert sorted((rank, replica) for rank, replica, *_ in four) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for *_, here, _ in four:
        assert close(here, losses)
