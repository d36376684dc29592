"""Networks with two towers or an encoder of pictures and a decoder of text."""

from __future__ import annotations

import torch
from torch import nn

from .case import BATCH_SIZE, VOCABULARY, WIDTH, Batch, add, from_config, generator, network

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def _pairs(step: int) -> Batch:
    """Captions [B, 8] that end with token 2, and pictures [B, 3, 16, 16]."""
    numbers = generator(step)
    ids = torch.randint(5, VOCABULARY, (BATCH_SIZE, 8), generator=numbers)
    ids[:, -1] = 2
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(BATCH_SIZE, 3, 16, 16, generator=numbers),
    }


def _captions(step: int) -> Batch:
    made = _pairs(step)
    return {**made, "labels": made["input_ids"].clone()}


def _pictures_to_text(step: int) -> Batch:
    made = _captions(step)
    return {"pixel_values": made["pixel_values"], "labels": made["labels"]}


add(
    "CLIPModel",
    network("CLIPModel", "CLIPConfig", text_config=_TEXT, vision_config=_VISION, projection_dim=16),
    _pairs,
    options={"return_loss": True},
)
add(
    "SiglipModel",
    network("SiglipModel", "SiglipConfig", text_config=_TEXT, vision_config=_VISION),
    _pairs,
    options={"return_loss": True},
)
add(
    "BlipForConditionalGeneration",
    network(
        "BlipForConditionalGeneration",
        "BlipConfig",
        text_config={**_TEXT, "encoder_hidden_size": WIDTH},
        vision_config=_VISION,
    ),
    _captions,
)


def _questions(step: int) -> Batch:
    made = _pairs(step)
    numbers = generator(step + 50)
    return {**made, "labels": torch.rand(BATCH_SIZE, 5, generator=numbers)}


add(
    "ViltForQuestionAnswering",
    network(
        "ViltForQuestionAnswering", "ViltConfig", num_labels=5, **{**_TEXT, **_VISION, "num_hidden_layers": 4}
    ),
    _questions,
)


def _vision_encoder_decoder() -> nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, ViTConfig

    decoder = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**_VISION), decoder)
    config.decoder_start_token_id = 1
    config.pad_token_id = 0
    return from_config("VisionEncoderDecoderModel", config)


add("VisionEncoderDecoderModel", _vision_encoder_decoder, _pictures_to_text)
