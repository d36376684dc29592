"""``smp.nn``: layers that stand in for fused ones."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``, which PyTorch computes in one kernel already."""


class FlashAttentionLayer(nn.Module):
    """Attention without the matrix of all scores in memory, by ``scaled_dot_product_attention``.

    The scale of the scores is ``scale`` if given, else 1/sqrt(head size) if ``scale_attention_scores``, divided by
    ``layer_idx + 1`` if ``scale_attn_by_layer_idx``. With ``use_alibi`` each head h adds ``-slope_h * distance``
    (Press et al., arXiv 2108.12409) and there is no dropout.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = 0.0 if use_alibi else attention_dropout_prob
        self.use_alibi = use_alibi
        if scale is None:
            scale = 1.0
            if scale_attention_scores and attention_head_size is not None:
                scale /= math.sqrt(attention_head_size)
            if scale_attn_by_layer_idx and layer_idx is not None:
                scale /= layer_idx + 1
            fixed = not scale_attention_scores or attention_head_size is not None
            self.scale, self.by_head_size = scale, not fixed
        else:
            self.scale, self.by_head_size = scale, False

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """``qkv``: [batch, sequence, 3, heads, head size]; ``attn_mask``: [batch, 1, 1, sequence], added to the scores.

        Returns [batch, heads, sequence, head size].
        """
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scale = self.scale / math.sqrt(query.shape[-1]) if self.by_head_size else self.scale
        length = query.shape[-2]
        bias: Tensor | None = attn_mask
        if self.use_alibi:
            bias = alibi(query) if bias is None else bias + alibi(query)
        if bias is not None and causal:
            future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
            bias = bias.expand(-1, -1, length, -1).masked_fill(future, float("-inf"))
        dropout = self.dropout if self.training else 0.0
        result: Any = F.scaled_dot_product_attention(
            query,
            key,
            value,
            None if bias is None else bias.to(query.dtype),
            dropout,
            causal and bias is None,
            scale=scale,
        )
        return result


def alibi(query: Tensor, bias_max: float = 8.0) -> Tensor:
    """[1, heads, sequence, sequence]: minus the distance, times 2^(-bias_max h / heads) for head h = 1, 2, ..."""
    heads, length = query.shape[1], query.shape[2]
    slopes = 2.0 ** (-bias_max * torch.arange(1, heads + 1, device=query.device) / heads)
    at = torch.arange(length, device=query.device)
    return -slopes.view(1, heads, 1, 1) * (at[None, :] - at[:, None]).abs()
