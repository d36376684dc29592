"""Networks whose layers are not alike, unmodified, with random weights, and a mini-batch for each.

Sizes are such that a step of `BATCH` samples takes about a second on one thread. Everything that makes one run
differ from the next (dropout, dropped paths) is off, so that gradients can be compared.

Legend: B batch, S sequence, T target sequence, C channels, H height, W width, M mel bins, N frames.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTConfig

BATCH = 16
SEED = 20
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """`build(small)` and `inputs(small)`: the network and its mini-batch, or tiny ones to see that they run.

    `blocks` matches the names of the modules that a user would count when dealing out equally many.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool], Inputs]
    blocks: str


def loss(outputs: Any, inputs: Inputs) -> Tensor:
    """What the network computed from its labels; for the plain GPT, the loss of the next token."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs.flatten(0, 1), inputs["labels"].flatten())
    return outputs.loss


def arguments(inputs: Inputs) -> Inputs:
    """What the network's forward takes: the plain GPT is given no labels."""
    return {"ids": inputs["ids"]} if "ids" in inputs else inputs


def _transformers(name: str, settings: Callable[[bool], dict[str, Any]]) -> Callable[[bool], nn.Module]:
    """`transformers.<name>` with its family's configuration."""

    def build(small: bool) -> nn.Module:
        import transformers

        torch.manual_seed(SEED)
        network = getattr(transformers, name)
        return network(network.config_class(**settings(small))).train()

    return build


def _gpt(small: bool) -> nn.Module:
    torch.manual_seed(SEED)
    return GPT(_gpt_config(small))


def _gpt_config(small: bool) -> GPTConfig:
    if small:
        return GPTConfig(blocks=4, width=16, heads=2, context=8, vocabulary=100)
    return GPTConfig(blocks=8, width=192, heads=6, context=48, vocabulary=50_000)


def _tokens(small: bool) -> Inputs:
    config = _gpt_config(small)
    ids = torch.randint(config.vocabulary, (BATCH, config.context + 1), generator=_numbers())
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _images(size: int) -> Callable[[bool], Inputs]:
    """`pixel_values` [B, 3, H, W] with a class each."""

    def inputs(small: bool) -> Inputs:
        side, numbers = 32 if small else size, _numbers()
        pixels = torch.randn(BATCH, 3, side, side, generator=numbers)
        return {"pixel_values": pixels, "labels": torch.randint(2, (BATCH,), generator=numbers)}

    return inputs


def _swin(small: bool) -> dict[str, Any]:
    sizes = {"embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4, "image_size": 32}
    if not small:
        sizes = {"embed_dim": 48, "depths": [2, 2, 6, 2], "num_heads": [2, 4, 8, 16], "image_size": 128}
        sizes |= {"window_size": 4}
    return {**sizes, "patch_size": 2 if small else 4, "drop_path_rate": 0.0}


def _convnext(small: bool) -> dict[str, Any]:
    if small:
        return {"hidden_sizes": [8, 16], "depths": [1, 3], "num_stages": 2, "patch_size": 4}
    return {"hidden_sizes": [48, 96, 192, 384], "depths": [3, 3, 9, 3]}


def _resnet(small: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [2, 2], "embedding_size": 8}
    if not small:
        sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "embedding_size": 32}
    return {**sizes, "layer_type": "basic"}


def _t5(small: bool) -> dict[str, Any]:
    layers, width, heads = (2, 16, 2) if small else (4, 256, 4)
    return {
        "vocab_size": 100 if small else 8192,
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }


def _translation(small: bool) -> Inputs:
    """`input_ids` [B, S] and `labels` [B, T]: the source is longer."""
    source, target, vocabulary = (8, 4, 100) if small else (96, 48, 8192)
    numbers = _numbers()
    return {
        "input_ids": torch.randint(5, vocabulary, (BATCH, source), generator=numbers),
        "labels": torch.randint(5, vocabulary, (BATCH, target), generator=numbers),
    }


def _whisper(small: bool) -> dict[str, Any]:
    layers, width, heads = (2, 16, 2) if small else (4, 192, 4)
    return {
        "vocab_size": 100 if small else 8192,
        "num_mel_bins": 8 if small else 80,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_source_positions": _frames(small) // 2,
        "max_target_positions": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "dropout": 0.0,
    }


def _frames(small: bool) -> int:
    return 24 if small else 400


def _speech(small: bool) -> Inputs:
    """`input_features` [B, M, N] and `labels` [B, T]."""
    mel, target, vocabulary = (8, 6, 100) if small else (80, 32, 8192)
    numbers = _numbers()
    return {
        "input_features": torch.randn(BATCH, mel, _frames(small), generator=numbers),
        "labels": torch.randint(5, vocabulary, (BATCH, target), generator=numbers),
    }


def _numbers() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


MODELS = {
    "swin": Model(_transformers("SwinForImageClassification", _swin), _images(128), r"\.blocks\.\d+"),
    "convnext": Model(
        _transformers("ConvNextForImageClassification", _convnext), _images(96), r"stages\.\d+\.layers\.\d+"
    ),
    "t5": Model(_transformers("T5ForConditionalGeneration", _t5), _translation, r"\.block\.\d+"),
    "whisper": Model(
        _transformers("WhisperForConditionalGeneration", _whisper), _speech, r"coder\.layers\.\d+"
    ),
    "gpt-50k": Model(_gpt, _tokens, r"^blocks\.\d+"),
    "resnet": Model(
        _transformers("ResNetForImageClassification", _resnet), _images(128), r"stages\.\d+\.layers\.\d+"
    ),
}
