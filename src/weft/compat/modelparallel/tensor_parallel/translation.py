"""States of a :class:`DistributedTransformerLMHead` with the names of Hugging Face's models, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.compat.modelparallel.tensor_parallel.head import DistributedTransformerLMHead
from weft.errors import UsageError

State = dict[str, Any]

_LAYERS = "transformer.seq_layers."
_HALVES = {
    "gpt2": {
        "attention.pre_layernorm": "ln_1",
        "attention.dense": "attn.c_proj",
        "cross_attention.pre_layernorm": "ln_cross_attn",
        "cross_attention.query": "crossattention.q_attn",
        "cross_attention.dense": "crossattention.c_proj",
        "output.pre_layernorm": "ln_2",
        "output.dense1": "mlp.c_fc",
        "output.dense2": "mlp.c_proj",
    },
    "bert": {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.dense": "attention.output.dense",
        "attention.post_layernorm": "attention.output.LayerNorm",
        "cross_attention.query": "crossattention.self.query",
        "cross_attention.key": "crossattention.self.key",
        "cross_attention.value": "crossattention.self.value",
        "cross_attention.dense": "crossattention.output.dense",
        "cross_attention.post_layernorm": "crossattention.output.LayerNorm",
        "output.dense1": "intermediate.dense",
        "output.dense2": "output.dense",
        "output.post_layernorm": "output.LayerNorm",
    },
}
_REST = {
    "gpt2": {
        "word_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_layernorm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    "bert": {
        "word_embedding": "bert.embeddings.word_embeddings",
        "position_embedding": "bert.embeddings.position_embeddings",
        "token_type_embedding": "bert.embeddings.token_type_embeddings",
        "embedding_layernorm": "bert.embeddings.LayerNorm",
    },
}
_HALVES["roberta"] = _HALVES["bert"]
_HALVES["gptj"] = {
    "attention.pre_layernorm": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.dense": "attn.out_proj",
    "output.dense1": "mlp.fc_in",
    "output.dense2": "mlp.fc_out",
}
_HALVES["gptneo"] = {
    "attention.pre_layernorm": "ln_1",
    "attention.query": "attn.attention.q_proj",
    "attention.key": "attn.attention.k_proj",
    "attention.value": "attn.attention.v_proj",
    "attention.dense": "attn.attention.out_proj",
    "output.pre_layernorm": "ln_2",
    "output.dense1": "mlp.c_fc",
    "output.dense2": "mlp.c_proj",
}
_REST["roberta"] = {own: there.replace("bert.", "roberta.") for own, there in _REST["bert"].items()}
_REST["gptneo"] = _REST["gpt2"]
_REST["gptj"] = {own: there for own, there in _REST["gpt2"].items() if own != "position_embedding"}
_LAYERS_THERE = {
    "bert": "bert.encoder.layer.", "roberta": "roberta.encoder.layer.",
    **dict.fromkeys(("gpt2", "gptj", "gptneo"), "transformer.h."),
}  # fmt: skip
_FUSED = {
    "attn.c_attn": ("attention", "query", "key", "value"),
    "crossattention.c_attn": ("cross_attention", "key", "value"),
}
"""GPT-2's projections that are one weight there, and several here."""
_LEFT_OUT = (
    ".attn.bias", ".attn.masked_bias", ".attn.attention.bias", ".attn.attention.masked_bias", ".attn.embed_positions",
    ".position_ids", ".token_type_ids",
)  # fmt: skip
"""Constants that older versions of ``transformers`` kept in states."""
_FIRST_POSITION = {"roberta": 2}
"""How many rows of positions there stand for no position."""


def to_hf(state: Mapping[str, Any], model: str) -> State:
    """The state with the names that Hugging Face's ``model`` has; one that has them already comes back as it is.

    Raises:
        UsageError: A tensor has no place there.
    """
    prefix, plain = _bare(state)
    if not any(name.startswith(_LAYERS) for name in plain):
        return dict(state)
    _need(model)
    result: State = {}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, value in plain.items():
        number, half, kind = _parts(name, _LAYERS)
        if number is None:
            if half == "position_embedding":
                value = torch.cat([value.new_zeros(_FIRST_POSITION.get(model, 0), *value.shape[1:]), value])
            result[f"{_found(_REST[model], half, name)}.{kind}"] = value
            continue
        whole, own = _place_in_fused(model, half)
        if whole:
            fused.setdefault(f"{_LAYERS_THERE[model]}{number}.{whole}.{kind}", {})[own] = value
        else:
            there = f"{_LAYERS_THERE[model]}{number}.{_found(_HALVES[model], half, name)}"
            result[f"{there}.{kind}"] = _turned(value, model, there, kind)
    for name, parts in fused.items():
        one = torch.cat([parts[own] for own in ("query", "key", "value") if own in parts])
        result[name] = one.t().contiguous() if one.dim() == 2 else one
    return {prefix + name: value for name, value in result.items()}


def from_hf(state: Mapping[str, Any], model: str) -> State:
    """The state with the names of a :class:`DistributedTransformerLMHead`, if this process has built one.

    Else it comes back as it is. Models of Hugging Face keep their names here.

    Raises:
        UsageError: A tensor has no place there.
    """
    return _from_hf(state, model) if DistributedTransformerLMHead.any_built else dict(state)


def layer_to_hf(state: Mapping[str, Any], model: str) -> State:
    """The state of one :class:`DistributedTransformerLayer` with the names of a layer of Hugging Face's ``model``.

    Raises:
        UsageError: A tensor has no place there.
    """
    return _of_layer(to_hf, state, model, _LAYERS, _LAYERS_THERE[model])


def layer_from_hf(state: Mapping[str, Any], model: str) -> State:
    """The state of one layer of Hugging Face's ``model`` with the names of a :class:`DistributedTransformerLayer`.

    Raises:
        UsageError: A tensor has no place there.
    """
    return _of_layer(_from_hf, state, model, _LAYERS_THERE[model], _LAYERS)


def _of_layer(
    translate: Callable[[Mapping[str, Any], str], State],
    state: Mapping[str, Any],
    model: str,
    here: str,
    there: str,
) -> State:
    """The state of one layer, as the first layer of a model that has no more."""
    result = translate({f"{here}0.{name}": value for name, value in state.items()}, model)
    return {name.removeprefix(f"{there}0."): value for name, value in result.items()}


def _from_hf(state: Mapping[str, Any], model: str) -> State:
    prefix, plain = _bare(state)
    if any(name.startswith(_LAYERS) for name in plain):
        return dict(state)
    _need(model)
    halves = {there: own for own, there in _HALVES[model].items()}
    rest = {there: own for own, there in _REST[model].items()}
    base = _LAYERS_THERE[model].partition(".")[0] + "."
    if not any(name.startswith(base) for name in plain):  # the state of the model without a head
        plain = {base + name: value for name, value in plain.items()}
    result: State = {}
    for name, value in plain.items():
        if name.endswith(_LEFT_OUT):
            continue
        number, half, kind = _parts(name, _LAYERS_THERE[model])
        if number is None:
            own = _found(rest, half, name)
            result[f"{own}.{kind}"] = (
                value[_FIRST_POSITION.get(model, 0) :] if own == "position_embedding" else value
            )
        elif model == "gpt2" and half in _FUSED:
            layer, *parts = _FUSED[half]
            one = value.t() if value.dim() == 2 else value
            for which, part in zip(parts, one.chunk(len(parts)), strict=True):
                result[f"{_LAYERS}{number}.{layer}.{which}.{kind}"] = part.contiguous()
        else:
            own = f"{_LAYERS}{number}.{_found(halves, half, name)}.{kind}"
            result[own] = _turned(value, model, half, kind)
    return {prefix + name: value for name, value in result.items()}


def _need(model: str) -> None:
    if model not in _HALVES:
        raise UsageError(
            f"DistributedTransformerLMHead computes something else than {model}, so its state has no names there: use "
            "Hugging Face's model, which is cut over ranks as it is and keeps its names"
        )


def _bare(state: Mapping[str, Any]) -> tuple[str, State]:
    """A prefix that all names have, and the state without it and without marks."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    prefix = "module." if tensors and all(name.startswith("module.") for name in tensors) else ""
    return prefix, {name.removeprefix(prefix): value for name, value in tensors.items()}


def _parts(name: str, layers: str) -> tuple[str | None, str, str]:
    """The number of the layer, None outside; the module; the parameter in it."""
    module, _, kind = name.rpartition(".")
    if not name.startswith(layers):
        return None, module, kind
    number, _, half = module.removeprefix(layers).partition(".")
    return number, half, kind


def _place_in_fused(model: str, half: str) -> tuple[str, str]:
    if model == "gpt2":
        for whole, (layer, *parts) in _FUSED.items():
            for own in parts:
                if half == f"{layer}.{own}":
                    return whole, own
    return "", ""


def _turned(value: Tensor, model: str, module: str, kind: str) -> Tensor:
    """A weight of GPT-2's linears has the inputs first."""
    return value.t().contiguous() if model == "gpt2" and kind == "weight" and "ln_" not in module else value


def _found(names: Mapping[str, str], module: str, name: str) -> str:
    if module not in names:
        raise UsageError(
            f"{name} has no place in the other model: only what both have can be translated, so leave it out of the "
            "state"
        )
    return names[module]
