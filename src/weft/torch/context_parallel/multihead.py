"""PyTorch's ``nn.MultiheadAttention`` as functions for which there are rules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.torch.tensor_parallel.rules import Unsplittable


def attend(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The result of the module's ``forward``, with the same arguments.

    Raises:
        Unsplittable: The module adds keys of its own, or has no samples.
    """
    if module.bias_k is not None or module.add_zero_attn or query.dim() != 3:
        raise Unsplittable("adds keys of its own, or has no samples")
    given = (query, key, value)
    if not module.batch_first:
        given = tuple(each.transpose(0, 1) for each in given)  # type: ignore[assignment]
    if module.in_proj_weight is None:
        weights: Any = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    else:
        weights = module.in_proj_weight.chunk(3)
    biases: Any = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projected = map(F.linear, given, weights, biases)
    q, k, v = (each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for each in projected)
    mask = None
    if is_causal and key_padding_mask is None and not need_weights:
        pass  # attention of the kernel's own
    else:
        mask, is_causal = _mask(module, attn_mask, key_padding_mask, q, k), False
    dropout, weights = module.dropout if module.training else 0.0, None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    result = F.linear(mixed.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)
    return (result if module.batch_first else result.transpose(0, 1)), weights


def _mask(
    module: nn.MultiheadAttention, mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Both masks as numbers to be added to scores."""
    found = []
    if mask is not None:
        found.append(mask.unflatten(0, (-1, module.num_heads)) if mask.dim() == 3 else mask)
    if padding is not None:
        found.append(padding.view(-1, 1, 1, k.shape[2]))
    numbers = [
        torch.zeros(each.shape, dtype=q.dtype, device=q.device).masked_fill(each, float("-inf"))
        if each.dtype == torch.bool
        else each.to(q.dtype)
        for each in found
    ]
    return None if not numbers else numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]
