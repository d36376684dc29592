"""Mixtures of experts and state-space models: data-dependent shapes, scans, two kinds of layer in one net."""

from __future__ import annotations

from .case import LAYERS, VOCABULARY, WIDTH, add, network
from .decoders import modern
from .inputs import causal, translation

modern("Mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
modern(
    "Qwen2Moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
modern("Olmoe", num_experts=4, num_experts_per_tok=2, output_router_logits=True)
modern(
    "DeepseekV3",
    num_key_value_heads=4,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
add(
    "MambaForCausalLM",
    network(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=LAYERS,
        time_step_rank=4,
    ),
    causal(),
)
add(
    "Mamba2ForCausalLM",
    network(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        num_hidden_layers=LAYERS,
    ),
    causal(),
)
modern(
    "Jamba",
    num_experts=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=4,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)
add(
    "SwitchTransformersForConditionalGeneration",
    network(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=4,
        expert_capacity=8,
        decoder_start_token_id=0,
    ),
    translation(),
)
