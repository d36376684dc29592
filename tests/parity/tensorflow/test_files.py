"""Files of Keras that hold the whole model; see `run_files`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.long import one_in  # noqa: E402
from tests.parity.jobs import Outcome, outcomes  # noqa: E402
from tests.parity.tensorflow.jobs import checks_of, start  # noqa: E402

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1200)

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a check on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "tensorflow/run_files.py", "check", start)


@pytest.mark.parametrize(
    ("ranks", "check"), one_in(3, [(2, name) for name in checks_of("run_files.py")]), ids=str
)
def test_as_plain_keras_writes_and_reads(ranks: int, check: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, check)
    assert not outcome.faults(), outcome.faults()
