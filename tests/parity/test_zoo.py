"""Real model classes train the same on several processes as on one: loss, gradients, buffers, parameters.

Each case is an item of its own; the items of one number of processes share a job (see `jobs`). What is
compared, and how closely, stands in `compare`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import transformers

from tests.long import one_in

from .jobs import Outcome, outcomes
from .zoo import CASES

# Setting up the first item runs the job of all.
pytestmark = pytest.mark.timeout(1800)

ON_THREE = [
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "Gemma2ForCausalLM",
    "MixtralForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "SwinForImageClassification",
    "ResNetForImageClassification",
    "CLIPModel",
]

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a case on a number of ranks; the first question runs all the selected ones."""
    return outcomes(request, __file__, "run_zoo.py", "case")


def _ids() -> list[tuple[int, str]]:
    return [(2, case) for case in CASES] + [(3, case) for case in ON_THREE]


@pytest.mark.parametrize(("ranks", "case"), one_in(20, _ids()), ids=lambda value: str(value))
def test_trains_as_one_process_does(ranks: int, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, case)
    if transformers.__version__.startswith("4."):
        lacking = re.search(r"not trained in one process: AttributeError.*has no attribute", outcome.faults())
        if lacking:
            pytest.skip(f"transformers {transformers.__version__} has no {case}, or lacks what it takes")
    assert not outcome.faults(), outcome.faults()
    owned = [set(line["owned"]) for line in outcome.lines]
    assert sum(1 for names in owned if names) > 1, f"parameters by rank: {[len(names) for names in owned]}"
    assert sum(map(len, owned)) == len(set().union(*owned)), "two ranks own the same parameter"
    assert set().union(*owned) == set(outcome.lines[0]["every"])
