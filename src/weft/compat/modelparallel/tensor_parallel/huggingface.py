"""Functions of ``smp.nn.huggingface``: translations of states, and hooks by which a layer is replaced."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.compat.modelparallel.tensor_parallel.translation import from_hf, layer_from_hf, layer_to_hf, to_hf
from weft.errors import UsageError

Translate = Callable[..., dict[str, Any]]
Hooks = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
_CACHES = {"cache", "layer_past", "past_key_value", "past_key_values"}
"""What versions of ``transformers`` call a layer's cache."""
_OF_POSITIONS = {"position_ids", "cache_position"}
"""Without a meaning to a layer that takes positions from the embedding, or counts them from 0."""


def translations(model: str) -> tuple[Translate, Translate]:
    """For one of Hugging Face's models: states to its names, and back; see :mod:`.translation`."""

    def to(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> dict[str, Any]:
        return to_hf(state_dict, model)

    def back(state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return from_hf(state_dict, model)

    to.__doc__ = to_hf.__doc__
    back.__doc__ = from_hf.__doc__
    return to, back


def layer_translations(model: str) -> tuple[Translate, Translate]:
    """As :func:`translations`, for the state of one layer."""

    def to(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return layer_to_hf(state_dict, model)

    def back(state_dict: Mapping[str, Any]) -> dict[str, Any]:
        return layer_from_hf(state_dict, model)

    to.__doc__ = layer_to_hf.__doc__
    back.__doc__ = layer_from_hf.__doc__
    return to, back


def gpt2_hooks() -> Hooks:
    """The hooks for ``tp_register_with_module(GPT2Block, smp.nn.DistributedTransformerLayer, *hooks)``.

    ``transformers`` from 5 on, whose layers give a tensor.
    """
    _need_transformers()
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    def init_hook(config: Any, layer_idx: int | None = None) -> Any:
        if (
            config.add_cross_attention
            or config.scale_attn_by_inverse_layer_idx
            or not config.scale_attn_weights
        ):
            raise UsageError(
                "a GPT2Block with cross attention or a scale of its own is not replaced: leave it out"
            )
        return (), {
            **_sizes(config.num_attention_heads, config.hidden_size),
            "intermediate_size": config.n_inner or 4 * config.hidden_size,
            "attention_dropout_prob": config.attn_pdrop, "hidden_dropout_prob": config.resid_pdrop,
            "activation": _activation(config.activation_function), "layernorm_epsilon": config.layer_norm_epsilon,
            "initializer_range": config.initializer_range, "use_normal_initialization": True,
            "causal_mask_size": config.n_positions, "pre_layernorm": True, "post_layernorm": False,
        }  # fmt: skip

    return init_hook, _forward_hook_of(GPT2Block), _first


def bert_hooks() -> Hooks:
    """The hooks for ``tp_register_with_module(BertLayer, smp.nn.DistributedTransformerLayer, *hooks)``.

    Also for the layers of RoBERTa. ``transformers`` from 5 on, whose layers give a tensor.
    """
    _need_transformers()
    from transformers.models.bert.modeling_bert import BertLayer

    def init_hook(config: Any, layer_idx: int | None = None) -> Any:
        if config.is_decoder or config.add_cross_attention:
            raise UsageError("a layer of BERT that decodes is not replaced: leave it out")
        return (), {
            **_sizes(config.num_attention_heads, config.hidden_size), "intermediate_size": config.intermediate_size,
            "attention_dropout_prob": config.attention_probs_dropout_prob,
            "hidden_dropout_prob": config.hidden_dropout_prob, "activation": _activation(config.hidden_act),
            "layernorm_epsilon": config.layer_norm_eps, "initializer_range": config.initializer_range,
            "use_normal_initialization": True, "pre_layernorm": False, "post_layernorm": True,
        }  # fmt: skip

    return init_hook, _forward_hook_of(BertLayer), _first


def gptj_hooks() -> Hooks:
    """The hooks for ``tp_register_with_module(GPTJBlock, smp.nn.DistributedTransformerLayer, *hooks)``."""
    _need_transformers()
    from transformers.models.gptj.modeling_gptj import GPTJBlock

    def init_hook(config: Any, layer_idx: int | None = None) -> Any:
        return (), {
            **_sizes(config.n_head, config.n_embd), "intermediate_size": config.n_inner or 4 * config.n_embd,
            "attention_dropout_prob": config.attn_pdrop, "hidden_dropout_prob": config.resid_pdrop,
            "activation": _activation(config.activation_function), "layernorm_epsilon": config.layer_norm_epsilon,
            "initializer_range": config.initializer_range, "use_normal_initialization": True,
            "causal_mask_size": config.n_positions, "pre_layernorm": True, "post_layernorm": False,
            "rotary_dim": config.rotary_dim or config.n_embd // config.n_head, "use_parallel_residual": True,
            "qkv_bias": False, "dense_bias": False, "attention_in_fp32": True,
        }  # fmt: skip

    gives = inspect.signature(GPTJBlock.forward).return_annotation
    result_hook = _first if gives in (Tensor, "torch.Tensor") else _with_no_weights
    return init_hook, _forward_hook_of(GPTJBlock, counts=True), result_hook


def gptneo_hooks() -> Hooks:
    """The hooks for ``tp_register_with_module(GPTNeoBlock, smp.nn.DistributedTransformerLayer, *hooks)``."""
    _need_transformers()
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoBlock

    def init_hook(config: Any, layer_id: int = 0) -> Any:
        local = config.attention_layers[layer_id] == "local"
        return (), {
            **_sizes(config.num_heads, config.hidden_size),
            "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
            "attention_dropout_prob": config.attention_dropout, "hidden_dropout_prob": config.resid_dropout,
            "activation": _activation(config.activation_function), "layernorm_epsilon": config.layer_norm_epsilon,
            "initializer_range": config.initializer_range, "use_normal_initialization": True,
            "causal_mask_size": config.max_position_embeddings, "pre_layernorm": True, "post_layernorm": False,
            "window_size": config.window_size if local else None, "scale_attention_scores": False,
            "qkv_bias": False, "attention_in_fp32": True,
        }  # fmt: skip

    return init_hook, _forward_hook_of(GPTNeoBlock), _with_no_weights


def _counts_from_0(positions: Tensor) -> bool:
    """True if they are 0, 1, ... for all samples."""
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def _sizes(heads: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "attention_head_size": width // heads, "hidden_size": width}


def _activation(name: str) -> str:
    return "gelu_new" if name == "gelu_pytorch_tanh" else "silu" if name == "swish" else name


def _need_transformers() -> None:
    try:
        from transformers import __version__
    except ImportError as error:
        raise UsageError("these hooks are for layers of transformers, which is not installed") from error
    if int(__version__.split(".")[0]) < 5:
        raise UsageError(
            f"these hooks need transformers 5, this is {__version__}: leave tp_register out, layers are cut over ranks "
            "as they are"
        )


def _forward_hook_of(block: type, counts: bool = False) -> Callable[..., Any]:
    """A hook that packs the arguments of ``block`` into the one tuple that the layer takes, by their names there.

    ``counts``: the layer counts positions itself, from 0.
    """
    named = inspect.signature(block.forward)  # type: ignore[attr-defined]
    right: Callable[[], Any] = lambda: None  # noqa: E731 - the positions that were looked at last

    def forward_hook(*args: Any, **kwargs: Any) -> Any:
        nonlocal right
        from transformers.cache_utils import Cache

        given = named.bind(None, *args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        states, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
        for name, value in given.items():
            if value is not None and (name in _CACHES or isinstance(value, Cache)):
                raise UsageError(
                    "a replaced layer keeps no keys and values: call the model with use_cache=False"
                )
            if isinstance(value, Tensor) and name not in _OF_POSITIONS:
                raise UsageError(
                    f"a replaced {block.__name__} does not take {name}: leave tp_register out, layers are cut over "
                    "ranks as they are"
                )
            if counts and name == "position_ids" and isinstance(value, Tensor) and right() is not value:
                if not _counts_from_0(value):
                    raise UsageError(
                        f"a replaced {block.__name__} counts positions from 0: call the model without position_ids"
                    )
                right = weakref.ref(value)  # all layers get the same; on a GPU each look waits for it
        if mask is not None and mask.dtype == torch.bool:
            lowest = torch.finfo(states.dtype).min
            mask = torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, lowest)
        return ((states, mask),), {}

    return forward_hook


def _first(result: Any) -> Any:
    return result[0]


def _with_no_weights(result: Any) -> Any:
    """States, and nothing for the attention's weights: what layers of GPT-Neo give, and of GPT-J up to 5.23."""
    return result[0], None
