"""Replicas compute what one process computes with the whole batch; scripts for smdistributed run unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import long
from tests.parity.tensorflow.jobs import WARM

pytest.importorskip("tensorflow")

HERE = Path(__file__).parent


def like_public(n, script, *args, options=()):
    """What each rank told of a script that was written for smdistributed."""
    options = ["--device", "cpu", "--smdistributed", *options]
    done = run_ranks(n, HERE / "scripts" / script, args, timeout=300, options=options, warm=WARM).check()
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    return [json.loads(line) for line in lines]


def close(one, other):
    return one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_two_replicas_compute_as_one_process_with_the_whole_batch():
    done = run_ranks(2, HERE / "replicas.py", timeout=300, warm=WARM).check()
    assert done.stdout.count("passed\n") == 2


@long
def test_a_script_for_data_parallelism():
    ((rank, size, losses, weights),) = like_public(1, "mnist_dp.py")
    assert (rank, size) == (0, 1) and losses[-1] < 0.7 * losses[0]
    split = like_public(2, "mnist_dp.py")
    assert sorted(told[:2] for told in split) == [[0, 2], [1, 2]]
    for _, _, here, weights_here in split:
        assert close(here, losses) and close(weights_here, weights)


@long
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


EMBEDDING = """
import sys, keras, numpy as np
import weft.tensorflow as weft

weft.init(microbatches=2)
keras.utils.set_random_seed(0)
layers = [keras.Input((3,), dtype="int32"), keras.layers.Embedding(20, 4), keras.layers.Flatten()]
layers.append(keras.layers.Dense(1))
model = weft.DistributedModel(keras.Sequential(layers))
model.compile(sys.argv[1], "mse")
x = np.random.RandomState(0).randint(0, 20, (16, 3))[weft.dp_rank() :: weft.dp_size()]
for _ in range(2):
    model.fit(x, x.sum(1, keepdims=True) / 60, batch_size=len(x), verbose=0)
print("RESULT", [float(np.abs(each).sum()) for each in model.get_weights()], flush=True)
"""


def test_a_warning_says_that_gradients_of_embeddings_are_averaged_as_dense_tensors():
    """With SGD that changes nothing; with Adam it does, and nobody would see it."""
    one, two = (run_ranks(n, EMBEDDING, ["sgd"], timeout=200, warm=WARM).check() for n in (1, 2))
    said = "gradients of embeddings are averaged over the replicas as dense tensors"
    assert said not in one.stderr and two.stderr.count(said) == 1, two.stderr
    weights = [
        json.loads(line.partition("RESULT ")[2])
        for done in (one, two)
        for line in done.stdout.splitlines()
        if "RESULT" in line
    ]
    assert len(weights) == 3 and all(close(each, weights[0]) for each in weights)
