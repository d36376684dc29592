"""Models of transformers on four ranks train as in one process.

Layers are cut over two ranks, in a pipeline or in copies; or copies of a pipeline share parameters.

Each case is an item of its own; those of one layout share a job (see `jobs`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import transformers

from tests import warm
from tests.long import one_in

from .jobs import Outcome, run_items

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        transformers.__version__ < "5", reason="some of the models are newer than transformers 4"
    ),
]

LAYOUTS = {
    "cut, in a pipeline": (2, {"tensor_parallel_degree": 2}),
    "cut, in copies": (1, {"tensor_parallel_degree": 2}),
    "shared, in a pipeline": (2, {"sharded_data_parallel_degree": 2}),
}
"""Partitions, and more settings."""
TEN = [
    "LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification",
    "WhisperForConditionalGeneration", "MixtralForCausalLM", "OPTForCausalLM", "GPTNeoXForCausalLM",
    "MistralForCausalLM",
]  # fmt: skip
TWENTY = [
    *TEN, "BloomForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
    "GPT2LMHeadModel:checkpointed", "Qwen2MoeForCausalLM", "OlmoeForCausalLM", "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
]  # fmt: skip
ITEMS = [(layout, case) for layout in LAYOUTS for case in (TEN if layout.startswith("shared") else TWENTY)]
LEAST = {"cut, in a pipeline": 1.0, "cut, in copies": 2.0}
"""What all ranks hold together of a model whose layers are all cut, as a multiple of the model."""

OutcomeOf = Callable[[str, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    """The outcome of a case in a layout; the first question runs all the selected ones of that layout."""
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == Path(__file__) and hasattr(item, "callspec"):
            selected.setdefault(item.callspec.params["layout"], []).append(item.callspec.params["case"])
    known: dict[str, dict[str, Outcome]] = {}

    def outcome(layout: str, case: str) -> Outcome:
        if layout not in known:
            partitions, settings = LAYOUTS[layout]

            def start(arguments: Sequence[str], env: Mapping[str, str], cwd: Path) -> warm.Job:
                return warm.start(arguments, {**env, "WEFT_SET": json.dumps(settings)}, cwd)

            known[layout] = run_items("run_zoo.py", selected[layout], 4, partitions, start=start)
        return known[layout][case]

    return outcome


@pytest.mark.parametrize(("layout", "case"), one_in(20, ITEMS), ids=str)
def test_trains_as_one_process_does(layout: str, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(layout, case)
    assert not outcome.faults(), outcome.faults()
    told = [text for line in outcome.lines for text in line["verified"]]
    assert told and all("gives the losses of one process" in text for text in told), told
    if layout in LEAST:
        assert sum(line["held"] for line in outcome.lines) < 1.6 * LEAST[layout], (
            "layers are whole on several ranks"
        )
