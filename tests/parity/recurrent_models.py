"""Models of `transformers` that see positions by recurrences, convolutions and windows, as tests of sequences have
them: batches differ in length and in what is padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.parity.zoo.case import VOCABULARY, WIDTH, Batch, Case, generator, network

SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
DECODER: dict[str, Any] = {
    **SHARED, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
WINDOW: dict[str, Any] = {**DECODER, "sliding_window": 5}


def batches(masked: bool = True) -> Callable[[int], Batch]:
    """Words of several lengths; with a mask the last of some rows are padding, other rows in each step."""

    def batch(step: int) -> Batch:
        length = (24, 32, 21)[step % 3]
        ids = torch.randint(3, VOCABULARY, (8, length), generator=generator(step))
        if not masked:
            return {"input_ids": ids, "labels": ids.clone()}
        seen = torch.arange(length) < torch.tensor([length, length - 3 - 2 * step] * 4).view(-1, 1)
        return {"input_ids": ids, "attention_mask": seen.long(), "labels": ids.masked_fill(~seen, -100)}

    return batch


def _case(family: str, config: str = "", masked: bool = True, name: str = "", **settings: Any) -> Case:
    build = network(f"{family}ForCausalLM", config or f"{family}Config", **settings)
    return Case(name or f"{family}, positions", build, batches(masked))


RECURRENT = {
    case.name: case
    for case in (
        _case("Lfm2", **DECODER, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
        _case("Mamba", **SHARED, state_size=4, time_step_rank=4),
        _case("FalconMamba", **SHARED, state_size=4, time_step_rank=4),
        _case("Mamba2", **SHARED, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
        _case("FalconH1", **DECODER, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=2,
              mamba_d_state=8, mamba_chunk_size=4),
        _case("Qwen3Next", **DECODER, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8, num_experts=0, layer_types=["linear_attention", "full_attention"],
              mlp_only_layers=[0, 1]),
        _case("Rwkv", masked=False, **SHARED, attention_hidden_size=WIDTH, context_length=64),
    )
}  # fmt: skip
WINDOWED = {
    case.name: case
    for case in (
        _case("Mistral", **WINDOW),
        _case("Mistral", masked=False, name="Mistral, not padded", **WINDOW),
        _case("Qwen2", **WINDOW, use_sliding_window=True, max_window_layers=1),
        _case("Gemma2", **WINDOW, query_pre_attn_scalar=8),
        _case("Gemma3", "Gemma3TextConfig", **WINDOW, query_pre_attn_scalar=8, sliding_window_pattern=2),
        _case("GptOss", **WINDOW, num_local_experts=2, num_experts_per_tok=1),
    )
}
