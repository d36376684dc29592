"""Replicas compute what one process computes with the whole batch; scripts for smdistributed run unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import run_ranks
from tests.long import long, one_in
from tests.parity.jobs import Outcome, outcomes
from tests.parity.tensorflow.jobs import WARM, checks_of, start

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


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> Callable[[int, str], Outcome]:
    """The outcome of a check on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "tensorflow/run_replicas.py", "check", start)


@pytest.mark.timeout(1200)  # setting up the first item runs the job of all
@pytest.mark.parametrize(
    ("ranks", "check"), one_in(2, [(4, name) for name in checks_of("run_replicas.py")]), ids=str
)
def test_copies_of_a_split_model_train_as_one_process(ranks, check, outcome_of):
    outcome = outcome_of(ranks, check)
    assert not outcome.faults(), outcome.faults()


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
