"""Networks that read pictures: patches, windows, convolutions with running statistics."""

from __future__ import annotations

import torch

from .case import BATCH_SIZE, LAYERS, WIDTH, Batch, add, generator, network
from .inputs import image, segmented_image

_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
_STAGES = {"depths": [1, 1, 2, 1], "hidden_sizes": [8, 16, 24, 32]}


def classifier(family: str, normalised: bool = False, **settings: object) -> None:
    """An image classifier with five classes.

    `normalised` networks take statistics of each microbatch: those need more than two rows and more than one
    pixel to be well conditioned.
    """
    name = f"{family}ForImageClassification"
    batch = image(size=64, rows=16) if normalised else image()
    rate = 0.01 if normalised else 0.02
    add(name, network(name, f"{family}Config", num_labels=5, **settings), batch, learning_rate=rate)


classifier("ViT", **_VIT)
classifier("DeiT", **_VIT)
classifier("Dinov2", **_VIT)
classifier("Beit", use_mask_token=False, use_relative_position_bias=True, **_VIT)
classifier("Data2VecVision", use_mask_token=False, use_shared_relative_position_bias=True, **_VIT)
classifier("Swin", image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
classifier(
    "Swinv2", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4
)
classifier("ConvNext", **_STAGES)
classifier("ConvNextV2", **_STAGES)
classifier("ResNet", normalised=True, embedding_size=8, layer_type="basic", **_STAGES)
classifier("RegNet", normalised=True, embedding_size=8, groups_width=8, **_STAGES)
classifier("Bit", normalised=True, embedding_size=8, num_groups=4, **_STAGES)
classifier(
    "FocalNet",
    image_size=32,
    patch_size=2,
    embed_dim=8,
    depths=[1, 2, 1],
    focal_levels=[1, 1, 1],
    focal_windows=[3] * 3,
)
classifier("PoolFormer", **_STAGES)
classifier(
    "EfficientNet",
    normalised=True,
    image_size=64,
    width_coefficient=0.125,
    depth_coefficient=0.25,
    hidden_dim=160,
)
_SEGFORMER = {
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 16, 16],
    "num_attention_heads": [1, 1, 2, 2],
    "sr_ratios": [4, 2, 1, 1],
    "decoder_hidden_size": 16,
}
classifier("Segformer", **_SEGFORMER)
add(
    "SegformerForSemanticSegmentation",
    network("SegformerForSemanticSegmentation", "SegformerConfig", num_labels=5, **_SEGFORMER),
    segmented_image(),
)
add(
    "DPTForSemanticSegmentation",
    network(
        "DPTForSemanticSegmentation",
        "DPTConfig",
        num_labels=5,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        **_VIT,
    ),
    segmented_image(),
)


def _noisy_image(step: int) -> Batch:
    """Pictures [B, 3, 32, 32] and the noise [B, 16 patches] that decides which patches are hidden."""
    numbers = generator(step)
    pixels = torch.randn(BATCH_SIZE, 3, 32, 32, generator=numbers)
    return {"pixel_values": pixels, "noise": torch.rand(BATCH_SIZE, 16, generator=numbers)}


add(
    "ViTMAEForPreTraining",
    network(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        decoder_hidden_size=16,
        decoder_intermediate_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        **_VIT,
    ),
    _noisy_image,
)
