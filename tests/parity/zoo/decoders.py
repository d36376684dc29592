"""Language models that read from left to right."""

from __future__ import annotations

from .case import LAYERS, VOCABULARY, WIDTH, add, network
from .inputs import causal

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# The names of sizes that most decoders since Llama share.
_MODERN = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_TOKENS,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 64,
    **_TOKENS,
}


def modern(family: str, padded: bool = False, config: str = "", **settings: object) -> None:
    """A case of the Llama kind; `settings` come over the shared sizes (None takes one away)."""
    more = {key: settings.pop(key) for key in ("optimizer", "learning_rate") if key in settings}
    merged = {key: value for key, value in {**_MODERN, **settings}.items() if value is not None}
    name = family + "ForCausalLM"
    build = network(name, config or family + "Config", **merged)
    add(name, build, causal(padded=padded), **more)


add("GPT2LMHeadModel", network("GPT2LMHeadModel", "GPT2Config", **_GPT2), causal())
add("GPTJForCausalLM", network("GPTJForCausalLM", "GPTJConfig", rotary_dim=4, **_GPT2), causal())
add(
    "GPTBigCodeForCausalLM",
    network("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **_GPT2),
    causal(padded=True),
)
add("CodeGenForCausalLM", network("CodeGenForCausalLM", "CodeGenConfig", rotary_dim=4, **_GPT2), causal())
add(
    "GPTNeoForCausalLM",
    network(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        max_position_embeddings=64,
        window_size=4,
        attention_types=[[["global", "local"], LAYERS // 2]],
        **_TOKENS,
    ),
    causal(padded=True),
)

modern("Llama", padded=True, optimizer="adamw", learning_rate=0.003)
modern("Mistral", sliding_window=6)
modern("Qwen2", padded=True)
modern("Qwen3", head_dim=8)
modern("Gemma", head_dim=8)
modern("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
modern("Gemma3", head_dim=8, sliding_window=4, query_pre_attn_scalar=8, config="Gemma3TextConfig")
modern("Phi", num_key_value_heads=4, partial_rotary_factor=0.5)
modern("Phi3", padded=True)
modern("GPTNeoX", num_key_value_heads=None)
modern("StableLm", padded=True)
modern("Olmo2")
modern("Cohere")
modern("Granite", padded=True, residual_multiplier=0.5)
modern("Starcoder2", sliding_window=6)
add(
    "OPTForCausalLM",
    network(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        word_embed_proj_dim=16,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
        **_TOKENS,
    ),
    causal(padded=True),
)
add(
    "BloomForCausalLM",
    network(
        "BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=LAYERS, n_head=4
    ),
    causal(padded=True),
)
modern("Falcon", num_key_value_heads=None, intermediate_size=None, alibi=True, padded=True)
add(
    "MptForCausalLM",
    network("MptForCausalLM", "MptConfig", vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, n_heads=4),
    causal(padded=True),
)
add(
    "XGLMForCausalLM",
    network(
        "XGLMForCausalLM",
        "XGLMConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        ffn_dim=2 * WIDTH,
        num_layers=LAYERS,
        attention_heads=4,
        max_position_embeddings=64,
    ),
    causal(),
)
add(
    "XLNetLMHeadModel",
    network(
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        d_inner=64,
    ),
    causal(padded=True),
)
