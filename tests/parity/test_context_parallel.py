"""Models compute on parts of sequences as one process does on whole ones, and what should be cut is.

The items of one number of processes share a job (see `jobs`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.torch.tensor_parallel.splits import pattern

from .jobs import Outcome, outcomes

pytestmark = pytest.mark.timeout(900)

# By case: what is cut, layers that are alike once.
CUT: dict[str, set[str]] = {
    "LlamaForCausalLM": {"model.layers.*", "lm_head"},
    "GPT2LMHeadModel": {"transformer.h.*", "lm_head"},
}

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    return outcomes(request, __file__, "run_context_parallel.py", "case")


@pytest.mark.parametrize(("ranks", "case"), [(2, case) for case in CUT], ids=str)
def test_trains_as_one_process_does(ranks: int, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, case)
    assert not outcome.faults(), outcome.faults()
    for line in outcome.lines:
        assert {pattern(f"{name}.")[:-1] for name in line["cut"]} == CUT[case], line["whole"]
