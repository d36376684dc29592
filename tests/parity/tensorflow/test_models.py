"""Keras models train the same on several processes as on one: losses, gradients, all variables, predictions.

Each case is an item of its own; the items of one number of processes share a job (see `tests.parity.jobs`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.long import one_in
from tests.parity.jobs import Outcome, outcomes  # noqa: E402
from tests.parity.tensorflow.jobs import start  # noqa: E402
from tests.parity.tensorflow.models import APPLICATIONS, CASES  # noqa: E402

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1800)

ON_THREE = [
    "mlp", "cnn", "residual", "gpt", "tied", "encoder_decoder", "lstm", "loops", "many_inputs", "mixed_bfloat16",
]  # fmt: skip
OTHER_WAYS = ["mlp/eager", "gpt/eager", "cnn/calls", "lstm/calls", "many_inputs/calls"]
BY_HAND = (
    "ResNet50", "EfficientNetB0", "DenseNet121", "InceptionV3", "Xception", "NASNetMobile", "ConvNeXtTiny",
)  # fmt: skip
"""Large ones, which `run_cases.py` trains when it is asked."""

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a case on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "tensorflow/run_cases.py", "case", start)


def _ids() -> list[tuple[int, str]]:
    on_two = [case for case in CASES if case not in BY_HAND] + OTHER_WAYS
    return [(2, case) for case in on_two] + [(3, case) for case in ON_THREE]


ALONE = {"functions"}
"""Models that are one unit: a function that is called twice keeps their parts together."""


@pytest.mark.parametrize(("ranks", "case"), one_in(20, _ids()), ids=lambda value: str(value))
def test_trains_as_one_process_does(ranks: int, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, case)
    assert not outcome.faults(), outcome.faults()
    owned = [set(line["owned"]) for line in outcome.lines]
    if case not in ALONE:
        assert sum(1 for own in owned if own) > 1, f"variables by rank: {[len(own) for own in owned]}"
    assert sum(map(len, owned)) == len(set().union(*owned)), "two ranks own the same variable"
    assert set().union(*owned) == set(outcome.lines[0]["every"])


def test_the_large_ones_are_there() -> None:
    assert {*BY_HAND} < {*APPLICATIONS} < {*CASES}
