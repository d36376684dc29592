"""The parts of the original's transformer: attention, the two linears after it, linears and embeddings as PyTorch's."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.compat.modelparallel.layers import alibi
from weft.compat.modelparallel.tensor_parallel.base import (
    DistributedModule,
    activation_of,
    check_norms,
    check_options,
    fill,
    items_of,
)
from weft.errors import UsageError


class DistributedLinear(nn.Linear):
    """``nn.Linear``."""


class DistributedEmbedding(nn.Embedding):
    """``nn.Embedding``; weights are drawn from a normal distribution with the deviation ``initializer_range``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **kwargs: Any) -> None:
        deviation = kwargs.pop("initializer_range", 0.02)
        for name in ("_skip_allgather", "_skip_scatter_and_merge"):
            kwargs.pop(name, None)
        super().__init__(num_embeddings, embedding_dim, *args, **kwargs)
        if kwargs.get("_weight") is None:
            nn.init.normal_(self.weight, std=deviation)


def check_rotary(rotary_dim: int | None, head_size: int) -> None:
    """Raise :class:`UsageError` for a number of features that cannot be turned in pairs."""
    if rotary_dim is not None and (rotary_dim % 2 or not 0 < rotary_dim <= head_size):
        raise UsageError(
            f"rotary_dim is {rotary_dim}: choose an even number up to attention_head_size, {head_size}"
        )


def turned(states: Any, rotary_dim: int) -> Any:
    """Queries or keys [N, heads, S, head size], of which the first ``rotary_dim`` features know their position.

    Features 2i and 2i + 1 of position p are turned by the angle p / 10000^(2i / rotary_dim) (Su et al., arXiv
    2104.09864), as GPT-J has them.
    """
    device = states.device
    speeds = 10000.0 ** -(torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(states.shape[-2], device=device)[:, None] * speeds
    sin, cos = angles.sin().to(states.dtype), angles.cos().to(states.dtype)
    even, odd = states[..., :rotary_dim].unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((pairs, states[..., rotary_dim:]), -1) if rotary_dim < states.shape[-1] else pairs


class _Half(DistributedModule):
    """A half of a layer: ``x + f(x)``, with a norm before ``f``, or after the sum, or both."""

    def __init__(
        self, hidden_size: int, dropout: float, epsilon: float, before: bool, after: bool, in_fp32: bool
    ) -> None:
        super().__init__()
        check_norms(self, before, after)
        self.pre_layernorm = nn.LayerNorm(hidden_size, epsilon) if before else nn.Identity()
        self.post_layernorm = nn.LayerNorm(hidden_size, epsilon) if after else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fp32_residual_addition = in_fp32

    def added(self, hidden: Tensor, result: Tensor) -> Tensor:
        """The output of the half: the residual path, and the norm after it."""
        result = self.dropout(result)
        if self.fp32_residual_addition:
            total = (hidden.float() + result.float()).to(hidden.dtype)
        else:
            total = hidden + result
        normed: Tensor = self.post_layernorm(total)
        return normed


class DistributedAttentionLayer(_Half):
    """Attention with its projections, residual path and norms: ``(hidden, attention_mask)`` gives ``hidden``.

    With ``cross_attention`` queries see other states: ``(hidden, cross_states, cross_mask)``. States are [N, S, H],
    masks are added to the scores, of shape [N, 1, 1, S], or None.

    ``causal_mask_size``: each position sees itself and those before it, in sequences of at most so many; None: all.
    ``use_alibi``: scores fall with the distance (Press et al., arXiv 2108.12409), for head h of H by
    2^(-alibi_bias_max h / H) a position. ``attention_in_fp32``: attention is computed in 32 bits.
    ``window_size``: with a causal mask, each position sees itself and as many before it, less one, as in GPT-Neo.
    ``rotary_dim``: so many features of each head know their position, see :mod:`.rotary`.
    ``scale_attention_scores``: scores are divided by the root of the head's size. ``qkv_bias``, ``dense_bias``: whether
    the projections have biases.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        causal_mask_size: int | None = None,
        cross_attention: bool = False,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        window_size: int | None = None,
        rotary_dim: int | None = None,
        scale_attention_scores: bool = True,
        qkv_bias: bool = True,
        dense_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            hidden_size, hidden_dropout_prob, layernorm_epsilon, pre_layernorm, post_layernorm, fp32_residual_addition
        )  # fmt: skip
        check_options(self, options)
        if cross_attention and (causal_mask_size is not None or use_alibi or rotary_dim is not None):
            raise UsageError(
                "cross attention knows no order: leave causal_mask_size, use_alibi and rotary_dim out"
            )
        if window_size is not None and (causal_mask_size is None or window_size < 1):
            raise UsageError(
                f"window_size is {window_size}, and causal_mask_size {causal_mask_size}: a window is for a causal "
                "mask, and has at least 1 position"
            )
        check_rotary(rotary_dim, attention_head_size)
        width = num_attention_heads * attention_head_size
        self.heads, self.head_size = num_attention_heads, attention_head_size
        self.attention_dropout_prob = attention_dropout_prob
        self.cross_attention, self.causal_mask_size = cross_attention, causal_mask_size
        self.alibi_bias_max = alibi_bias_max if use_alibi else None
        self.attention_in_fp32 = attention_in_fp32
        self.window_size, self.rotary_dim = window_size, rotary_dim
        self.scale = 1 / math.sqrt(attention_head_size) if scale_attention_scores else 1.0
        self.query = nn.Linear(hidden_size, width, qkv_bias)
        self.key = nn.Linear(hidden_size, width, qkv_bias)
        self.value = nn.Linear(hidden_size, width, qkv_bias)
        self.dense = nn.Linear(width, hidden_size, dense_bias)
        fill(self, initializer_range, use_normal_initialization)

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """[N, S, H]."""
        if self.cross_attention:
            hidden, states, mask = items_of(self, inputs, ("hidden", "cross_states", "cross_mask"))
        else:
            hidden, mask = items_of(self, inputs, ("hidden", "attention_mask"))
        normed = self.pre_layernorm(hidden)
        return self.added(hidden, self.attended(normed, states if self.cross_attention else normed, mask))

    def attended(self, normed: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        """The output of attention, [N, S, H], without residual path and norms."""
        query, key, value = (
            each.view(*each.shape[:2], self.heads, self.head_size).transpose(1, 2)
            for each in (self.query(normed), self.key(seen), self.value(seen))
        )
        if self.rotary_dim is not None:
            query, key = turned(query, self.rotary_dim), turned(key, self.rotary_dim)
        mixed = self._attend(query, key, value, mask)
        dense: Tensor = self.dense(mixed.transpose(1, 2).flatten(2))
        return dense

    def _attend(self, query: Any, key: Any, value: Any, mask: Tensor | None) -> Any:
        causal, length, dtype = self.causal_mask_size is not None, query.shape[-2], query.dtype
        if self.causal_mask_size is not None and length > self.causal_mask_size:
            raise UsageError(
                f"the sequence has {length} positions, and causal_mask_size is {self.causal_mask_size}: raise it, or "
                "shorten the sequence"
            )
        if self.attention_in_fp32:
            query, key, value = query.float(), key.float(), value.float()
        bias = mask
        if self.alibi_bias_max is not None:
            falling = alibi(query, self.alibi_bias_max)
            bias = falling if bias is None else bias + falling
        if bias is None and self.window_size is not None and self.window_size < length:
            bias = torch.zeros(1, 1, 1, length, device=query.device)
        if bias is not None:
            bias = bias.to(query.dtype)
            if causal:
                unseen = torch.ones(length, length, dtype=torch.bool, device=bias.device).triu(1)
                if self.window_size is not None:
                    unseen |= torch.ones_like(unseen).tril(-self.window_size)
                bias = bias.expand(-1, -1, length, -1).masked_fill(unseen, torch.finfo(bias.dtype).min)
        dropout = self.attention_dropout_prob if self.training else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, bias, dropout, causal and bias is None, scale=self.scale
        ).to(dtype)


class DistributedTransformerOutputLayer(_Half):
    """The two linears of a layer, with residual path and norms: ``hidden`` [N, S, H] gives ``hidden``."""

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            hidden_size, hidden_dropout_prob, layernorm_epsilon, pre_layernorm, post_layernorm, fp32_residual_addition
        )  # fmt: skip
        check_options(self, options)
        self.activation = activation
        activation_of(activation)
        self.dense1 = nn.Linear(hidden_size, intermediate_size)
        self.dense2 = nn.Linear(intermediate_size, hidden_size)
        fill(self, initializer_range, use_normal_initialization)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, S, H]."""
        return self.added(hidden, self.computed(self.pre_layernorm(hidden)))

    def computed(self, normed: Tensor) -> Tensor:
        """The output of the linears, [N, S, H], without residual path and norms."""
        dense: Tensor = self.dense2(activation_of(self.activation)(self.dense1(normed)))
        return dense
