"""Models compute on parts of sequences as one process does on whole ones, and what should be cut is.

The items of one number of processes share a job (see `jobs`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.long import one_in
from weft.torch.tensor_parallel.splits import pattern

from .jobs import Outcome, outcomes

pytestmark = pytest.mark.timeout(900)

# By case: what is cut, layers that are alike once.
CUT: dict[str, set[str]] = {
    "LlamaForCausalLM": {"model.layers.*", "lm_head"},
    "GPT2LMHeadModel": {"transformer.h.*", "lm_head"},
    "BertForMaskedLM": {"bert.encoder.layer.*", "cls"},
    "BloomForCausalLM": {"transformer.h.*", "lm_head"},
    "GemmaForCausalLM": {"model.layers.*", "lm_head"},
    "T5ForConditionalGeneration": {"encoder.block.*", "decoder.block.*", "lm_head"},
    "WhisperForConditionalGeneration": {"model.encoder.layers.*", "model.decoder.layers.*", "proj_out"},
    "ViTForImageClassification": {"vit.layers.*"},
    "GPT2LMHeadModel:checkpointed": {"transformer.h.*", "lm_head"},
    "OPTForCausalLM": {
        "model.decoder.layers.*.self_attn", "model.decoder.project_in", "model.decoder.project_out", "lm_head",
    },
    "two heads of keys": {"net.layers.*"},
    "checkpoints inside": {"net.layers.*"},
    "layers of PyTorch": {"net.layers.*.encoder.layers.*", "net.layers.*.decoder"},
    "layers of PyTorch, batch second": {"net.layers.*.encoder.layers.*", "net.layers.*.decoder"},
    "head of smdistributed": {"model.transformer"},
    "GPT2LMHeadModel, 12": {"transformer.h.*", "lm_head"},
    "T5ForConditionalGeneration, 12": {"encoder.block.*", "decoder.block.*", "lm_head"},
    "causal, rotary, places": {"net.layers.*", "head"},
    "causal, relative, written": {"net.layers.*", "head"},
    "causal, surprises": {"net.layers.*", "head"},
    "causal, windows of 2": {"net.layers.*", "head"},
    "causal, windows of 4": {"net.layers.*", "head"},
}  # fmt: skip
OVER_THREE = ["LlamaForCausalLM", "BertForMaskedLM", "causal, relative, written"]
"""The same over three ranks, which do not divide the lengths, but that of the last."""
BESIDE_HEADS = {
    "LlamaForCausalLM, 12": {"model.layers.*"},
    "GPT2LMHeadModel, 12": {"transformer.h.*"},
    "causal, rotary, places": {"net.layers.*", "head"},
    "causal, relative, written": {"net.layers.*", "head"},
    "causal, surprises": {"net.layers.*", "head"},
}
"""The same over two ranks, beside two that split weights."""
OWN_HEADS = {"LlamaForCausalLM, 12", "GPT2LMHeadModel, 12"}
"""No rank has other heads than its own: grouped heads, rotary positions, a fused projection."""
ORDER = {
    "GPT2LMHeadModel, 12": "balanced",
    "causal, rotary, places": "balanced",
    "causal, relative, written": "balanced",
    "causal, surprises": "balanced",
    "causal, windows of 2": "balanced",
    "causal, windows of 4": "net.layers.0: view sees 6 positions, which do not make 4 blocks",
    "BertForMaskedLM": "there is no causal attention",
}
"""How positions are dealt, or why they are not."""

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    return outcomes(request, __file__, "run_context_parallel.py", "case")


@pytest.mark.parametrize(
    ("ranks", "case"),
    one_in(
        4,
        [(2, case) for case in CUT]
        + [(3, case) for case in OVER_THREE]
        + [(4, case) for case in BESIDE_HEADS],
    ),
    ids=str,
)
def test_trains_as_one_process_does(ranks: int, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, case)
    assert not outcome.faults(), outcome.faults()
    for line in outcome.lines:
        expected = BESIDE_HEADS[case] if ranks == 4 else CUT[case]
        assert {pattern(f"{name}.")[:-1] for name in line["cut"]} == expected, line["whole"]
        if case in OWN_HEADS:
            assert not line["heads"]
        assert line["order"] == ORDER.get(case, line["order"])
