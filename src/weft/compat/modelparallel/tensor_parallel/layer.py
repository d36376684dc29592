"""A transformer layer, and a stack of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from weft.compat.modelparallel.tensor_parallel.base import DistributedModule, check_options, items_of
from weft.compat.modelparallel.tensor_parallel.parts import (
    DistributedAttentionLayer,
    DistributedTransformerOutputLayer,
)
from weft.errors import UsageError


class DistributedTransformerLayer(DistributedModule):
    """Attention, cross attention if wanted, and two linears: ``(hidden, attention_mask)`` in and out.

    With ``add_cross_attention``: ``(hidden, cross_states, attention_mask, cross_mask)`` in and out. States are
    [N, S, H], masks are added to the scores, of shape [N, 1, 1, S], or None. Other arguments: see the two halves.

    ``use_parallel_residual``: attention and the linears take the same normed states, and both are added, as in GPT-J.
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
        window_size: int | None = None,
        rotary_dim: int | None = None,
        scale_attention_scores: bool = True,
        qkv_bias: bool = True,
        dense_bias: bool = True,
        use_parallel_residual: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        if use_parallel_residual and (add_cross_attention or post_layernorm or not pre_layernorm):
            raise UsageError(
                "use_parallel_residual has one norm before both halves: write pre_layernorm=True, "
                "post_layernorm=False, and leave add_cross_attention out"
            )
        self.add_cross_attention, self.use_parallel_residual = add_cross_attention, use_parallel_residual
        both: dict[str, Any] = {
            "hidden_size": hidden_size, "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon, "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization, "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm, "fp32_residual_addition": fp32_residual_addition,
        }  # fmt: skip
        attention: dict[str, Any] = {
            **both, "num_attention_heads": num_attention_heads, "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob, "attention_in_fp32": attention_in_fp32,
            "scale_attention_scores": scale_attention_scores, "qkv_bias": qkv_bias, "dense_bias": dense_bias,
        }  # fmt: skip
        self.attention = DistributedAttentionLayer(
            **attention, causal_mask_size=causal_mask_size, use_alibi=use_alibi, alibi_bias_max=alibi_bias_max,
            window_size=window_size, rotary_dim=rotary_dim,
        )  # fmt: skip
        if add_cross_attention:
            self.cross_attention = DistributedAttentionLayer(**attention, cross_attention=True)
        self.output = DistributedTransformerOutputLayer(
            **both, intermediate_size=intermediate_size, activation=activation
        )
        if use_parallel_residual:
            self.output.pre_layernorm = nn.Identity()  # that of attention

    def forward(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The same tuple with new hidden states."""
        if not self.add_cross_attention:
            hidden, mask = items_of(self, inputs, ("hidden", "attention_mask"))
            if self.use_parallel_residual:
                normed = self.attention.pre_layernorm(hidden)
                attended = self.attention.added(hidden, self.attention.attended(normed, normed, mask))
                return self.output.added(attended, self.output.computed(normed)), mask
            return self.output(self.attention((hidden, mask))), mask
        names = ("hidden", "cross_states", "attention_mask", "cross_mask")
        hidden, states, mask, cross_mask = items_of(self, inputs, names)
        hidden = self.attention((hidden, mask))
        hidden = self.cross_attention((hidden, states, cross_mask))
        return self.output(hidden), states, mask, cross_mask


class DistributedTransformer(DistributedModule):
    """``num_layers`` layers, one after the other, in ``seq_layers``. Tuples and other arguments are those of
    :class:`DistributedTransformerLayer`.

    ``attention_layers``: of each layer ``"global"`` or ``"local"``; the first have no window, as in GPT-Neo.
    """

    def __init__(
        self, num_layers: int = 12, *args: Any, attention_layers: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__()
        window = kwargs.pop("window_size", None)
        kinds = ["local"] * num_layers if attention_layers is None else list(attention_layers)
        if len(kinds) != num_layers or not set(kinds) <= {"global", "local"}:
            raise UsageError(
                f"attention_layers is {kinds}: say global or local for each of the {num_layers} layers"
            )
        if attention_layers is not None and "local" in kinds and window is None:
            raise UsageError("attention_layers has local ones: say their window_size")
        windows = (window if kind == "local" else None for kind in kinds)
        self.seq_layers = nn.Sequential(
            *(DistributedTransformerLayer(*args, **{**kwargs, "window_size": size}) for size in windows)
        )

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Any:
        """The same tuple with new hidden states."""
        return self.seq_layers(inputs)
