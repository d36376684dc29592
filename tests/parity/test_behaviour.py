"""What a model may do, and what other libraries get wrong: each thing trains split as it does in one process.

The checks stand in `checks`, one function each. Here each is an item, and all share a job (see `jobs`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long import long, one_in

from .checks.harness import RANKS
from .checks.registry import CHECKS
from .jobs import Outcome, run_items, start_apart

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> Callable[[str], Outcome]:
    """The outcome of a check; the first question runs all the selected ones."""
    items = [
        item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")
    ]
    outcomes = run_items("run_checks.py", [item.callspec.params["name"] for item in items], RANKS)
    return outcomes.__getitem__


@pytest.mark.parametrize("name", one_in(15, CHECKS))
def test_check(name: str, outcome_of: Callable[[str], Outcome]) -> None:
    outcome = outcome_of(name)
    assert not outcome.faults(), outcome.faults()
    told = [line["agree"] for line in outcome.lines]
    assert all(value == told[0] for value in told), f"ranks disagree: {told}"


@long
def test_ranks_on_hosts_of_their_own() -> None:
    """There all that ranks send each other goes through gloo, beside what collectives and scripts send."""
    outcomes = run_items("run_checks.py", list(CHECKS)[::8], RANKS, start=start_apart)
    faults = [f"{name}: {outcome.faults()}" for name, outcome in outcomes.items() if outcome.faults()]
    assert not faults, "\n".join(faults)
