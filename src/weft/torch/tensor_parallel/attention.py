"""PyTorch's ``nn.MultiheadAttention`` on some of its heads.

It is one module with parameters for all: no calls of linears to be found, but known meaning. So weft does what it does,
with plain tensors, on this rank's heads. Modules with additional biases for keys and values, or with keys and values of
other sizes, stay whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.torch.tensors.cut_weights import own

from .cuts import Cut
from .rules import as_full_tensor, stream_of_part, wrap
from .shard_group import ShardGroup, leave

Enters = Callable[[Tensor, ShardGroup], Tensor]


def why_whole(module: nn.MultiheadAttention, size: int) -> str:
    """Why the module cannot be split; empty if it can."""
    if module.in_proj_weight is None:
        return "its keys and values have other sizes than its queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys and values of its own"
    if module.num_heads % size:
        return f"its {module.num_heads} heads cannot be divided by {size}"
    return ""


def cuts_of_attention(module: nn.MultiheadAttention) -> dict[str, Cut]:
    """The cuts of its parameters, by name."""
    width = module.embed_dim
    cuts = {"in_proj_weight": Cut(0, (width,) * 3, (3 * width, width))}
    if module.in_proj_bias is not None:
        cuts["in_proj_bias"] = Cut(0, (width,) * 3, (3 * width,))
    return {**cuts, "out_proj.weight": Cut(1, (width,), (width, width))}


def attend(
    module: nn.MultiheadAttention,
    shard_group: ShardGroup,
    enters: Enters,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Stands for the module's ``forward``, with the same arguments and results."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched, swapped = query.dim() == 3, query.dim() == 3 and not module.batch_first
    given = [each if batched else each.unsqueeze(0) for each in (query, key, value)]
    given = [each.transpose(0, 1) if swapped else each for each in given]
    q, k, v = _heads(module, shard_group, enters, given)
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None  # attention of the kernel's own
    else:
        is_causal, mask = False, _mask(attn_mask, key_padding_mask, q, k, shard_group)
    dropout = module.dropout if module.training else 0.0
    weights = None
    with stream_of_part(shard_group, dropout > 0):
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
    result = leave(F.linear(mixed.transpose(1, 2).flatten(2), own(module.out_proj, "weight")), shard_group)
    if module.out_proj.bias is not None:
        result = result + module.out_proj.bias.to(result.dtype)
    if weights is not None:
        weights = (
            leave(weights.sum(1) / module.num_heads, shard_group)
            if average_attn_weights
            else as_full_tensor(wrap(weights, 1, shard_group))
        )
        weights = weights if batched else weights.squeeze(0)
    result = result.transpose(0, 1) if swapped else result
    return (result if batched else result.squeeze(0)), weights


def _heads(
    module: nn.MultiheadAttention, shard_group: ShardGroup, enters: Enters, given: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of this rank's heads: (samples, heads, length, size of a head)."""
    entered = [enters(each, shard_group) for each in given]
    weight, bias = own(module, "in_proj_weight"), own(module, "in_proj_bias")
    if given[0] is given[1] is given[2]:
        found = F.linear(entered[0], weight, bias).chunk(3, -1)
    else:
        biases: Any = (None,) * 3 if bias is None else bias.chunk(3)
        weights = weight.chunk(3)
        found = tuple(map(F.linear, entered, weights, biases))
    size = module.embed_dim // module.num_heads
    q, k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in found)
    return q, k, v


def _mask(
    mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor, shard_group: ShardGroup
) -> Tensor | None:
    """Both masks as numbers to be added to scores of this rank's heads."""
    samples, heads, length, _ = q.shape
    found = []
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.view(samples, heads * shard_group.size, length, k.shape[2])
            mask = mask.narrow(1, shard_group.rank * heads, heads)
        found.append(mask)
    if padding is not None:
        found.append(padding.view(-1, 1, 1, k.shape[2]))
    numbers = [
        torch.zeros(each.shape, dtype=q.dtype, device=q.device).masked_fill(each, float("-inf"))
        if each.dtype == torch.bool
        else each.to(q.dtype)
        for each in found
    ]
    return None if not numbers else numbers[0] if len(numbers) == 1 else numbers[0] + numbers[1]


def forget_shortcuts(model: nn.Module, split: set[int]) -> None:
    """Keep modules of PyTorch from taking weights that are parts for whole ones: in evaluation, transformer layers do.

    Args:
        model: A model.
        split: The ids of the modules whose parameters are parts.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            if any(id(each) in split for each in module.modules()):
                module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            if any(id(each) in split for each in module.modules()):
                module.activation_relu_or_gelu = 0
