"""A transformer layer, and a stack of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .base import DistributedModule, check_options, items_of
from .parts import DistributedAttentionLayer, DistributedTransformerOutputLayer


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross attention if wanted, and two linears: ``(hidden, attention_mask)`` in and out.

    With ``add_cross_attention``: ``(hidden, cross_states, attention_mask, cross_mask)`` in and out. States are
    [N, S, H], masks are added to the scores, of shape [N, 1, 1, S], or None. Other arguments: see the two halves.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: int = 8,
        attention_in_fp32: bool = False,
        fp32_residual_addition: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        self.add_cross_attention = add_cross_attention
        both: dict[str, Any] = {
            "hidden_size": hidden_size, "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon, "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization, "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm, "fp32_residual_addition": fp32_residual_addition,
        }  # fmt: skip
        attention: dict[str, Any] = {
            **both, "num_attention_heads": num_attention_heads, "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob, "attention_in_fp32": attention_in_fp32,
        }  # fmt: skip
        self.attention = DistributedAttentionLayer(
            **attention, causal_mask_size=causal_mask_size, use_alibi=use_alibi, alibi_bias_max=alibi_bias_max
        )
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(**attention, cross_attention=True)
        self.output = DistributedTransformerOutputLayer(
            **both, intermediate_size=intermediate_size, activation=activation
        )

    def forward(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The same tuple with new hidden states."""
        if not self.add_cross_attention:
            hidden, mask = items_of(self, inputs, ("hidden", "attention_mask"))
            return self.output(self.attention((hidden, mask))), mask
        names = ("hidden", "cross_states", "attention_mask", "cross_mask")
        hidden, states, mask, cross_mask = items_of(self, inputs, names)
        hidden = self.attention((hidden, mask))
        hidden = self.cross_attention((hidden, states, cross_mask))
        return self.output(hidden), states, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """``num_layers`` layers, one after the other, in ``seq_layers``. Tuples and other arguments are those of
    :class:`DistributedTransformerLayer`."""

    def __init__(self, num_layers: int = 12, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(
            *(DistributedTransformerLayer(*args, **kwargs) for _ in range(num_layers))
        )

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Any:
        """The same tuple with new hidden states."""
        return self.seq_layers(inputs)
