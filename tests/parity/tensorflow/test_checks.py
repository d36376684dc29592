"""Checks that run split over ranks, beside one process; the workers say what each is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from tests.long import one_in  # noqa: E402
from tests.parity.jobs import Outcome, outcomes  # noqa: E402
from tests.parity.tensorflow.jobs import checks_of, start  # noqa: E402

# Setting up the first item of a worker runs the job of all its items.
pytestmark = pytest.mark.timeout(1200)

WORKERS = {
    "run_checks.py": 8, "run_alike.py": 2, "run_files.py": 3, "run_variables.py": 1, "run_xla.py": 3,
}  # fmt: skip
"""Files of checks, of which `make test` runs one in so many."""
ON_THREE = [
    "clipping_inside", "a_model_that_follows_its_gradient", "two_models", "placed_by_hand", "variables_of_the_script",
]  # fmt: skip
"""Those of ``run_checks.py`` that run on three ranks, too."""


def cases(worker: str) -> list[tuple[str, int, str]]:
    three = ON_THREE if worker == "run_checks.py" else []
    return [(worker, 2, name) for name in checks_of(worker)] + [(worker, 3, name) for name in three]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> Callable[[str, int, str], Outcome]:
    """The outcome of a check of a worker on a number of ranks; the first question runs all the selected ones."""
    known = {
        worker: outcomes(request, __file__, f"tensorflow/{worker}", "check", start) for worker in WORKERS
    }
    return lambda worker, ranks, check: known[worker](ranks, check)


@pytest.mark.parametrize(
    ("worker", "ranks", "check"),
    [case for worker, every in WORKERS.items() for case in one_in(every, cases(worker))],
    ids=str,
)
def test_as_in_one_process(
    worker: str, ranks: int, check: str, outcome_of: Callable[[str, int, str], Outcome]
) -> None:
    outcome = outcome_of(worker, ranks, check)
    assert not outcome.faults(), outcome.faults()


def test_all_checks_are_found() -> None:
    names = checks_of("run_checks.py")
    assert len(names) >= 20 and {*ON_THREE} < {*names}
