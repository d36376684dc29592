"""Models split over axis `tp` train as in one process, and what should be split is.

The items of one number of processes share a job (see `jobs`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.long import one_in

from .jobs import Outcome, outcomes, pass_checks
from .run_tensor_parallel_checks import CHECKS
from .tensor_parallel_models import OWN

pytestmark = pytest.mark.timeout(900)

FLATTENS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether PyTorch can see samples and heads in parts as one dimension: 2.11 cannot."""

# By case: how many linears are split, and a part of why one of the others is not.
SPLIT: dict[str, tuple[int, str]] = {
    "LlamaForCausalLM": (30, ""),
    "GPT2LMHeadModel": (19, ""),
    "BertForMaskedLM": (27, "layer_norm takes the whole"),
    "OPTForCausalLM": (27, "layer_norm takes the whole"),
    "GPTNeoXForCausalLM": (18, ""),
    "BloomForCausalLM": (18, "") if FLATTENS else (10, " "),
    "Qwen3ForCausalLM": (30, ""),
    "MistralForCausalLM": (30, ""),
    "GemmaForCausalLM": (30, ""),
    "PhiForCausalLM": (26, ""),
    "Phi3ForCausalLM": (18, ""),
    "ViTForImageClassification": (24, "its 5 results cannot be divided by 2"),
    "T5ForConditionalGeneration": (52, ""),
    "WhisperForConditionalGeneration": (34, "the model reads its weight by itself"),
    "PatchTSTForPrediction": (18, "batch_norm keeps statistics of the whole"),
    "GPT2LMHeadModel:checkpointed": (19, ""),
    "gated by chunk": (4, "cannot be divided"),
    "gated by slices": (4, "cannot be divided"),
    "gated by view": (2, "cannot be divided"),
    "fused attention": (4, "cannot be divided"),
    "three heads": (2, "its results are 3 x 3 x 10, and 3 cannot be divided by 2"),
    "one head of keys": (4, "has 1 heads of keys, which cannot be divided by 2"),
    "two heads of keys": (10, "cannot be divided"),
    "one fused head of keys": (2, "has 1 heads of keys, which cannot be divided by 2"),
    "checkpoints inside": (4, "cannot be divided"),
    "by hand": (10, "the script wants it whole"),
    "adapters": (7, ""),
    "layers of PyTorch": (11, "cannot be divided"),
    "layers of PyTorch, batch second": (11, "cannot be divided"),
    "layers of smdistributed": (16, "cannot be divided"),
    "head of smdistributed": (14, ""),
    "head as that of GPT-J": (14, ""),
    "head as that of GPT-Neo": (14, ""),
    "MixtralForCausalLM": (22, ""),
    "DeepseekV3ForCausalLM": (29, "mean takes the whole"),
    "SwitchTransformersForConditionalGeneration": (34, "softmax takes the whole"),
    "mixture": (4, "cannot be divided"),
    "shared expert": (8, "cannot be divided"),
    "normed mixture": (8, "cannot be divided"),
    "residual mixture": (3, "cannot be divided"),
    "stacked experts": (2, "cannot be divided"),
    "spoilt experts": (3, "cannot be divided"),
    "JetMoe": (4, "is the only one, so there is no sum in it"),
    "JetMoe, balanced": (2, "router has hooks"),
    "bf16": (10, "cannot be divided"),
    "MixtralForCausalLM by rank": (22, ""),
    "Qwen2MoeForCausalLM by rank": (34, "cannot be divided"),
    "OlmoeForCausalLM by rank": (14, "takes the whole"),
    "DeepseekV3ForCausalLM by rank": (29, "mean takes the whole"),
    "stacked experts by rank": (2, "cannot be divided"),
}

# How many of them have some of the experts on each rank.
BY_RANK = {
    "SwitchTransformersForConditionalGeneration": 2, "mixture": 2, "shared expert": 2,
    "residual mixture": 1, "spoilt experts": 1,
    "MixtralForCausalLM by rank": 4, "Qwen2MoeForCausalLM by rank": 4, "OlmoeForCausalLM by rank": 4,
    "DeepseekV3ForCausalLM by rank": 3, "stacked experts by rank": 2,
}  # fmt: skip

OVER_FOUR = {
    "mixture": (4, "cannot be divided"),
    "shared expert": (13, "cannot be divided"),
    "DeepseekV3ForCausalLM by rank": (29, "mean takes the whole"),
    "stacked experts": (2, "cannot be divided"),
    "GPT2LMHeadModel": (19, ""),
    "LlamaForCausalLM": (22, "has 4 heads of keys, which cannot be divided by 4"),
    "BertForMaskedLM": (27, "layer_norm takes the whole"),
    "T5ForConditionalGeneration": (52, ""),
    "ViTForImageClassification": (24, "its 5 results cannot be divided by 4"),
    "WhisperForConditionalGeneration": (34, "the model reads its weight by itself"),
    "MixtralForCausalLM": (14, "has 2 heads of keys, which cannot be divided by 4"),
    "by hand": (10, "the script wants it whole"),
}
"""The same over four ranks."""

OutcomeOf = Callable[[int, str], Outcome]


@pytest.fixture(scope="session")
def outcome_of(request: pytest.FixtureRequest) -> OutcomeOf:
    return outcomes(request, __file__, "run_tensor_parallel.py", "case")


@pytest.mark.parametrize(
    ("ranks", "case"), one_in(10, [(2, case) for case in SPLIT] + [(4, case) for case in OVER_FOUR]), ids=str
)
def test_trains_as_one_process_does(ranks: int, case: str, outcome_of: OutcomeOf) -> None:
    outcome = outcome_of(ranks, case)
    assert not outcome.faults(), outcome.faults()
    count, reason = (SPLIT if ranks == 2 else OVER_FOUR)[case]
    for line in outcome.lines:
        assert len(line["split"]) == count, line["split"]
        reasons = line["whole"].values()
        assert any(reason in each for each in reasons) if reason else not reasons, line["whole"]
        assert len(line["by_rank"]) == BY_RANK.get(case, 0) - (ranks == 4 and case == "shared expert")
        assert line["parts"] == pytest.approx(1 / ranks, abs=0.05), "a rank holds its part of what is split"


def test_every_own_model_is_tried() -> None:
    assert OWN.keys() <= SPLIT.keys()


def test_chance_caches_copies_and_files() -> None:
    pass_checks("run_tensor_parallel_checks.py", [*CHECKS], 2)
