"""Sizes from a `config.json`, and what is refused."""

from __future__ import annotations

import json

import pytest

from weft.errors import ConfigError, FormatError
from weft.graph.hugging_face import sizes_from_config

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 100, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


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
        ({"num_local_experts": 8}, r"\$\.num_local_experts: this is a mixture of 8 experts"),
        ({"vocab_size": None}, "no vocab: none of vocab_size is there; give it by --vocab"),
        ({"hidden_size": "wide"}, r"\$\.hidden_size: expected a whole number"),
        ({"num_key_value_heads": 3}, "kv_heads is 3, which must divide heads, 8"),
        ({"hidden_size": None, "text_config": {}}, "or use the config.json of one of its parts"),
    ],
)
def test_what_cannot_be_planned(change, told):
    with pytest.raises((FormatError, ConfigError), match=told):
        sizes_from_config(json.dumps({**LLAMA, **change}))


def test_what_is_no_json():
    with pytest.raises(FormatError, match="this is not JSON, so it cannot be a config.json"):
        sizes_from_config("hidden_size: 3")
