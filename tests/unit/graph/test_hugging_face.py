"""Sizes from a `config.json`, and what is refused."""

from __future__ import annotations

import json

import pytest

from weft.errors import ConfigError, FormatError
from weft.graph.experts import Experts
from weft.graph.hugging_face import parts_left_out, sizes_from_config

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 100, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
MIXED = {"num_experts": 8, "num_experts_per_tok": 2}


def test_a_llama():
    sizes = sizes_from_config(json.dumps(LLAMA), seq=128)
    assert (sizes.layers, sizes.ffn, sizes.key_heads, sizes.gated, sizes.tied, sizes.seq) == (
        2,
        100,
        2,
        True,
        False,
        128,
    )


def test_a_gpt_2_with_its_own_names():
    given = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_embd": 32,
        "n_head": 4,
        "n_inner": None,
        "vocab_size": 9,
        "n_ctx": 16,
    }
    sizes = sizes_from_config(json.dumps(given))
    assert (sizes.layers, sizes.ffn, sizes.gated, sizes.tied, sizes.seq) == (3, 128, False, True, 16)


def test_sizes_that_are_given_win_and_stand_in_for_those_that_the_file_lacks():
    lacking = {name: size for name, size in LLAMA.items() if name not in ("vocab_size", "intermediate_size")}
    sizes = sizes_from_config(json.dumps(lacking), vocab=9, hidden=128)
    assert (sizes.vocab, sizes.hidden, sizes.ffn, sizes.layers) == (9, 128, 512, 2)


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False), (None, False)])
def test_a_model_of_an_unknown_type_has_a_gate_if_its_activation_is_that_of_gates(activation, gated):
    config = {**LLAMA, "model_type": "of tomorrow", "hidden_act": activation}
    assert sizes_from_config(json.dumps(config)).gated is gated


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_local_experts": 8}, r"mixture of 8 experts, but none of .* give it by --experts-per-token"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "experts per token is 9, but there are 8"),
        (MIXED | {"decoder_sparse_step": 2}, r"\$\.decoder_sparse_step: one layer of 2 .* by --dense-layers"),
        (MIXED | {"mlp_only_layers": [1]}, r"\$\.mlp_only_layers: some layers .* by --dense-layers"),
        ({"ffn_config": {"moe_num_experts": 16}}, r"\$\.ffn_config\.moe_num_experts: this is a mixture"),
        (
            {"expert_count": 4},
            r"\$\.expert_count: this is a mixture of experts, but none of num_local_experts",
        ),
        ({"kv_lora_rank": 16}, "kv_lora_rank says that keys are latent, but qk_nope_head_dim is missing"),
        ({"vocab_size": None}, "no vocab: none of vocab_size is there; give it by --vocab"),
        ({"hidden_size": "wide"}, r"\$\.hidden_size: expected a whole number"),
        ({"num_key_value_heads": 3}, "kv_heads is 3, which must divide heads, 8"),
        ({"hidden_size": None, "text_config": {}}, r"\$\.text_config: no layers"),
        ({"is_encoder_decoder": True}, "encoder_layers, num_layers gives the encoder's layers"),
    ],
)
def test_what_cannot_be_planned(change, told):
    with pytest.raises((FormatError, ConfigError), match=told):
        sizes_from_config(json.dumps({**LLAMA, **change}))


def test_what_is_no_json():
    with pytest.raises(FormatError, match="this is not JSON, so it cannot be a config.json"):
        sizes_from_config("hidden_size: 3")


@pytest.mark.parametrize("more", [{"num_local_experts": 0}, {"num_experts": 1}, {"num_local_experts": None}])
def test_no_experts(more):
    assert sizes_from_config(json.dumps(LLAMA | more)) == sizes_from_config(json.dumps(LLAMA))


def test_options_say_how_experts_lie():
    told = MIXED | {
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 50,
        "moe_intermediate_size": 30,
    }
    found = sizes_from_config(json.dumps(LLAMA | told), dense_layers=1, experts_per_token=3)
    assert found.experts == Experts(8, 3, 30, 50, 1)
    assert sizes_from_config(json.dumps(LLAMA), experts=4, experts_per_token=1).experts == Experts(4, 1, 100)
    unknown = json.dumps(LLAMA | {"ffn_config": {"moe_num_experts": 16}})
    assert sizes_from_config(unknown, experts=1).experts is None


SMALL = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 500, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 8},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 12, "num_key_value_heads": 8, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_have_the_parameters_of_the_models_themselves(family):
    """Against the models as `transformers` builds them: all matrices are counted; norms and biases of a part of a per
    cent are not."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    config = SMALL | FAMILIES[family]
    sizes = sizes_from_config(json.dumps(config | {"model_type": family, "hidden_act": "silu"}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(family, **config)
        )
    matrices = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    every = sum(each.numel() for each in model.parameters())
    assert sizes.parameters == pytest.approx(every, rel=2e-3)
    small = sizes.layers * (
        2 * sizes.hidden + (sizes.latent.queries + sizes.latent.keys if sizes.latent else 0)
    )
    extra = sizes.layers * sizes.hidden if family == "qwen2_moe" else 0  # a gate for the shared expert
    assert sizes.parameters - small == matrices - extra


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, (64, 12, False)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, False)),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, (0, 0, False)),
        ({"model_type": "qwen2", "sliding_window": 64}, (0, 0, False)),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 8},
         (64, 4, False)),
        ({"model_type": "gemma2", "sliding_window": 64}, (64, 6, False)),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 6}, (64, 10, False)),
        ({"model_type": "gpt_oss", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 6},
         (64, 6, False)),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, (64, 9, True)),
        ({"model_type": "llama4_text", "attention_chunk_size": 64,
          "layer_types": ["chunked_attention"] * 3 + ["full_attention"] * 9}, (64, 3, True)),
    ],
)  # fmt: skip
def test_windows_of_attention(more, expected):
    sizes = sizes_from_config(json.dumps({**LLAMA, "num_hidden_layers": 12, **more}))
    assert (sizes.window, sizes.windowed, sizes.chunked) == expected
    assert (sizes.seen_share < 1.0) is bool(expected[0])


def test_layers_without_attention_are_refused():
    config = {**LLAMA, "layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(FormatError, match="layer_types.0.: weft plans no layer of linear_attention"):
        sizes_from_config(json.dumps(config))


PAIRS = {
    "t5": {
        "num_layers": 2, "num_decoder_layers": 3, "d_model": 64, "num_heads": 4, "d_kv": 24, "d_ff": 200,
        "n_positions": 64, "is_encoder_decoder": True, "vocab_size": 500,
    },
    "mt5": {
        "num_layers": 2, "d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 200, "is_encoder_decoder": True,
        "feed_forward_proj": "gated-gelu", "vocab_size": 500, "max_position_embeddings": 64,
    },
    "bart": {
        "encoder_layers": 2, "decoder_layers": 4, "d_model": 64, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 200, "decoder_ffn_dim": 200, "vocab_size": 500,
        "max_position_embeddings": 64, "is_encoder_decoder": True, "num_hidden_layers": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", PAIRS)
def test_encoders_with_decoders_have_the_parameters_of_the_models_themselves(family):
    """A decoder's second attention is counted; tables of positions and norms are of a few per cent in these."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    config = PAIRS[family]
    sizes = sizes_from_config(json.dumps(config | {"model_type": family}))
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            transformers.AutoConfig.for_model(family, **config)
        )
    every = sum(each.numel() for each in model.parameters())
    assert sizes.parameters == pytest.approx(every, rel=0.04)
    assert sizes.layers == {"t5": 5, "mt5": 4, "bart": 6}[family]


def test_a_vision_transformer_reads_patches():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    config = {
        "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256,
        "image_size": 64, "patch_size": 8, "num_channels": 3,
    }  # fmt: skip
    sizes = sizes_from_config(json.dumps(config | {"model_type": "vit"}))
    with torch.device("meta"):
        model = transformers.AutoModelForImageClassification.from_config(
            transformers.AutoConfig.for_model("vit", **config)
        )
    assert (sizes.seq, sizes.vocab) == (65, 192)
    assert sizes.parameters == pytest.approx(sum(each.numel() for each in model.parameters()), rel=0.02)
    assert sizes_from_config(json.dumps(config | {"model_type": "vit"}), seq=17).seq == 17


def test_the_text_model_of_several_is_planned():
    nested = {"model_type": "llava", "vision_config": {"hidden_size": 9}, "text_config": LLAMA}
    assert sizes_from_config(json.dumps(nested)) == sizes_from_config(json.dumps(LLAMA))
    assert parts_left_out(json.dumps(nested)) == ["vision_config"]
    assert parts_left_out(json.dumps(LLAMA | {"quantization_config": {}, "rope_scaling": {}})) == []
    above = {**nested, "tie_word_embeddings": True, "text_config": {**LLAMA, "tie_word_embeddings": None}}
    assert sizes_from_config(json.dumps(above)).tied
