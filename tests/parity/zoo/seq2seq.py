"""Encoder-decoders: every decoder layer reads the encoder's result, one embedding serves both."""

from __future__ import annotations

from torch import nn

from .case import VOCABULARY, WIDTH, add, from_config, network
from .inputs import translation

_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 2 * WIDTH,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}

for family in ("T5", "MT5", "UMT5"):
    name = f"{family}ForConditionalGeneration"
    add(name, network(name, f"{family}Config", **_T5), translation())
for family in ("Bart", "MBart", "Pegasus", "M2M100", "Blenderbot"):
    name = f"{family}ForConditionalGeneration"
    add(name, network(name, f"{family}Config", **_BART), translation())
add("MarianMTModel", network("MarianMTModel", "MarianConfig", **_BART), translation())
add(
    "LEDForConditionalGeneration",
    network(
        "LEDForConditionalGeneration",
        "LEDConfig",
        attention_window=[4, 4],
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        **{key: value for key, value in _BART.items() if key != "max_position_embeddings"},
    ),
    translation(source=8),
)
add(
    "ProphetNetForConditionalGeneration",
    network(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_position_embeddings=64,
        decoder_start_token_id=0,
    ),
    translation(),
)


def _encoder_decoder() -> nn.Module:
    """Two BERTs, the second with cross-attention."""
    from transformers import BertConfig, EncoderDecoderConfig

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), BertConfig(**sizes))
    config.decoder_start_token_id = 1
    config.pad_token_id = 0
    return from_config("EncoderDecoderModel", config)


add("EncoderDecoderModel", _encoder_decoder, translation())
