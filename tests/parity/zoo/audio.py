"""Networks that read sound and other series."""

from __future__ import annotations

import torch

from .case import BATCH_SIZE, LAYERS, VOCABULARY, WIDTH, Batch, add, generator, network
from .inputs import speech

_WAV2VEC2 = {
    "vocab_size": 24,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (8, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}

for family in ("Wav2Vec2", "Hubert", "WavLM", "Data2VecAudio"):
    settings = dict(_WAV2VEC2)
    if family == "WavLM":
        settings |= {"num_buckets": 8, "max_bucket_distance": 16}
    if family == "Data2VecAudio":
        settings |= {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}
    add(
        f"{family}ForCTC",
        network(f"{family}ForCTC", f"{family}Config", **settings),
        speech(),
    )
add(
    "SEWForCTC",
    network("SEWForCTC", "SEWConfig", squeeze_factor=2, **_WAV2VEC2),
    speech(),
)


def _spectrum(step: int) -> Batch:
    """`input_features` [B, 8 mel bins, 24 frames] and `labels` [B, 6]."""
    numbers = generator(step)
    return {
        "input_features": torch.randn(BATCH_SIZE, 8, 24, generator=numbers),
        "labels": torch.randint(5, VOCABULARY, (BATCH_SIZE, 6), generator=numbers),
    }


add(
    "WhisperForConditionalGeneration",
    network(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=12,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    _spectrum,
)


def _series(step: int) -> Batch:
    """A past [B, 16] and a future [B, 4] of values with one time feature."""
    numbers = generator(step)
    past = torch.rand(BATCH_SIZE, 16, generator=numbers) + 1.0
    future = torch.rand(BATCH_SIZE, 4, generator=numbers) + 1.0
    return {
        "past_values": past,
        "past_time_features": torch.rand(BATCH_SIZE, 16, 1, generator=numbers),
        "past_observed_mask": torch.ones(BATCH_SIZE, 16),
        "future_values": future,
        "future_time_features": torch.rand(BATCH_SIZE, 4, 1, generator=numbers),
    }


add(
    "TimeSeriesTransformerForPrediction",
    network(
        "TimeSeriesTransformerForPrediction",
        "TimeSeriesTransformerConfig",
        prediction_length=4,
        context_length=12,
        lags_sequence=[1, 2, 4],
        num_time_features=1,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    ),
    _series,
    learning_rate=0.01,
)


def _patched_series(step: int) -> Batch:
    numbers = generator(step)
    return {
        "past_values": torch.randn(BATCH_SIZE, 24, 3, generator=numbers),
        "future_values": torch.randn(BATCH_SIZE, 4, 3, generator=numbers),
    }


add(
    "PatchTSTForPrediction",
    network(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        num_input_channels=3,
        context_length=24,
        patch_length=4,
        patch_stride=4,
        prediction_length=4,
        num_hidden_layers=3,
        d_model=16,
        ffn_dim=32,
        num_attention_heads=4,
        loss="mse",
    ),
    _patched_series,
)
