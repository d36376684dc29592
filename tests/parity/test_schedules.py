"""Every schedule trains real models as one process does: loss, gradients, buffers, parameters.

On two, three and four ranks, and on two replicas of two partitions, whose gradients must be averaged whatever the
schedule does with the backward pass. The items of one number of ranks share a job (see `jobs`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long import one_in

from .jobs import Outcome, run_items
from .run_schedules import BY_FILE, DECIDED, ITEMS, LIMITED, MODELS, NAMED, TURNS

pytestmark = pytest.mark.timeout(1800)

SPLITTING = [name for name in NAMED if name.startswith(("zb", "v_"))]
OTHERS = [item for item in ITEMS if not item.endswith(("/interleaved", "/simple"))]  # the zoo has those
TWO = MODELS[:6:5]
SELECTED = {
    (2, 1): OTHERS,
    (3, 1): [
        f"{model}/{kind}" for model in TWO for kind in ("interleaved_1f1b", "looped_bfs", "list", *SPLITTING)
    ]
    + TURNS[2:],
    (4, 1): [f"{MODELS[1]}/{kind}" for kind in ("interleaved_1f1b", *SPLITTING)],
    (2, 2): [f"{model}/{kind}" for model in TWO for kind in ("1f1b", "auto", *SPLITTING)]
    + BY_FILE[:1]
    + LIMITED[:1]
    + DECIDED
    + TURNS[:1]
    + [
        f"{model}/{kind}"
        for model, kind in zip(
            (name for name in MODELS if name not in TWO),
            ("gpipe", "zb_h1", "interleaved_1f1b", "zbv", "looped_bfs", "v_half", "list", "zb_h1"),
            strict=True,
        )
    ],
}
"""Items by (partitions, replicas)."""

OutcomeOf = Callable[[tuple[int, int], str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of an item on a layout; the first question runs all the selected ones."""
    selected: dict[tuple[int, int], list[str]] = {}
    for item in request.session.items:
        if item.path == Path(__file__) and hasattr(item, "callspec"):
            params = item.callspec.params
            selected.setdefault(params["layout"], []).append(params["item"])
    known: dict[tuple[int, int], dict[str, Outcome]] = {}

    def outcome(layout: tuple[int, int], item: str) -> Outcome:
        if layout not in known:
            partitions, replicas = layout
            known[layout] = run_items("run_schedules.py", selected[layout], partitions * replicas, partitions)
        return known[layout][item]

    return outcome


@pytest.mark.parametrize(
    ("layout", "item"),
    one_in(20, [(layout, item) for layout, items in SELECTED.items() for item in items]),
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_trains_as_one_process_does(layout: tuple[int, int], item: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(layout, item)
    assert not outcome.faults(), outcome.faults()
