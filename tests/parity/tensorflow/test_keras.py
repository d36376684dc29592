"""Habits of Keras's users, split over ranks; see `run_keras`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.long import one_in  # noqa: E402
from tests.parity.jobs import PATHS, Outcome, outcomes  # noqa: E402
from tests.parity.tensorflow.jobs import checks_of, run, start  # noqa: E402

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1200)

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a check on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "tensorflow/run_keras.py", "check", start)


JOINS_ROWS = """
import keras, numpy as np, tensorflow as tf
import weft.tensorflow as weft
from tests.parity.tensorflow.run_keras import classifier, pairs

keras.utils.set_random_seed(0)
weft.init({"partitions": 2, "microbatches": 2})
model = weft.DistributedModel(classifier())
model.compile("sgd", pairs)
model.fit(np.eye(8, 6, dtype="float32"), np.zeros((8, 3)), verbose=0)
"""


def test_a_loss_that_joins_rows_ends_fit_before_a_weight_changes(tmp_path: Path) -> None:
    script = tmp_path / "joins.py"
    script.write_text(JOINS_ROWS)
    code, output = run(["run", "-n", "2", str(script)], PATHS, tmp_path, 300)
    assert (
        code and "VerifyError: fit gives other numbers in microbatches than for the whole batch" in output
    ), output


@pytest.mark.parametrize(
    ("ranks", "check"), one_in(3, [(2, name) for name in checks_of("run_keras.py")]), ids=str
)
def test_as_in_one_process(ranks: int, check: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, check)
    assert not outcome.faults(), outcome.faults()
