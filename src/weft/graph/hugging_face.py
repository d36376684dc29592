"""The sizes of a transformer from the `config.json` that Hugging Face's models come with."""

from __future__ import annotations

from collections.abc import Mapping

from weft.document import Document
from weft.errors import FormatError
from weft.foreign import parse_json
from weft.graph.experts import Experts, Latent
from weft.graph.sizes import Sizes

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim",),
}
"""What each size is called, in the order in which names are looked for."""
GATED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo",
    "olmo2",
    "cohere",
    "glm",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
)
"""Types of models whose feed-forward layers have a gate."""
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that have attention."""
EXPERTS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_k",
        "moe_topk",
    ),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "dense_layers": ("first_k_dense_replace",),
}
"""What the sizes of a mixture of experts are called."""
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""How many experts all tokens go to, each as wide as the others."""
EVERY = ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", "interleave_moe_layer_step")
"""Every how many layers one has experts; weft plans 1 only."""


def sizes_from_config(text: str, **given: int) -> Sizes:
    """The sizes that a `config.json` describes.

    Args:
        text: What the file holds.
        given: Sizes by the names of `NAMES` and `EXPERTS` that win over the file's, or stand in for those that it
            lacks. Without `seq` a sequence has as many tokens as the model takes.

    Raises:
        FormatError: It is not JSON, lacks a size, describes several models, or experts that lie otherwise than in all
            layers after the first ones.

    >>> gpt2 = '{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_ctx": 1024}'
    >>> sizes_from_config(gpt2).parameters
    124438272
    """
    config = Document(parse_json(text, "this is not JSON, so it cannot be a config.json"))
    found = {size: given.get(size) or _first(config, names) for size, names in NAMES.items()}
    if found["ffn"] is None and found["hidden"] is not None:
        found["ffn"] = 4 * found["hidden"]
    for size in ("layers", "hidden", "heads", "vocab", "seq"):
        if found[size] is None:
            raise FormatError(
                f"$: no {size}: none of {', '.join(NAMES[size])} is there; give it by --{size}"
                + (", or use the config.json of one of its parts" if "text_config" in config else "")
            )
    latent = _latent(config)
    if latent is not None:
        found["head_width"] = None
        found["kv_heads"] = None
    tied = "tie_word_embeddings" not in config or config["tie_word_embeddings"].value is not False
    experts = _experts(config, given)
    windows = _windows(config, found["layers"] or 0)
    return Sizes(**found, **windows, gated=_gated(config), tied=tied, experts=experts, latent=latent)  # type: ignore[arg-type]


def _windows(config: Document, layers: int) -> dict[str, int]:
    """The window of attention and the layers that have it: by the kinds of layers, else as the type of model has it."""
    kind = (
        config["model_type"].text()
        if "model_type" in config and config["model_type"].value is not None
        else ""
    )
    kinds = [each.text() for each in config["layer_types"]] if _has(config, "layer_types") else []
    for place, each in enumerate(kinds):
        if each not in ATTENTION:
            raise FormatError(
                f"$.layer_types[{place}]: weft plans no layer of {each}, only {', '.join(ATTENTION)}: leave "
                "layer_types out of a copy of the file, and all layers count as full attention"
            )
    width, chunk = (_first(config, (name,)) or 0 for name in ("sliding_window", "attention_chunk_size"))
    asked = (
        config["use_sliding_window"].value
        if _has(config, "use_sliding_window")
        else not kind.startswith("qwen")
    )
    if chunk:
        every = _first(config, ("no_rope_layer_interval",)) or 4
        count = kinds.count("chunked_attention") if kinds else layers - layers // every
        return {"window": chunk, "windowed": min(layers, count), "chunked": True}
    if not width or not asked:
        return {}
    pattern = _first(config, ("sliding_window_pattern", "_sliding_window_pattern")) or (
        2 if kind == "gemma2" else 0
    )
    first = _first(config, ("max_window_layers",)) or 0
    count = layers - layers // pattern if pattern else layers - first
    return {
        "window": width,
        "windowed": max(0, min(layers, kinds.count("sliding_attention") if kinds else count)),
    }


def _has(given: Document, name: str) -> bool:
    return name in given and given[name].value is not None


def _first(given: Document, names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if name in given and given[name].value is not None), None)
    return None if name is None else given[name].whole()


def _experts(config: Document, given: Mapping[str, int]) -> Experts | None:
    """The experts of a file and of options; none if there are none, or one."""
    found = {size: given.get(size, _first(config, names)) for size, names in EXPERTS.items()}
    count = found["experts"]
    if count in (None, 0, 1):
        if count is None:
            _refuse_unknown_experts(config)
        return None
    if found["experts_per_token"] is None:
        raise FormatError(
            f"$: a mixture of {count} experts, but none of {', '.join(EXPERTS['experts_per_token'])} is there: give it "
            "by --experts-per-token"
        )
    if found["expert_ffn"] is None:
        raise FormatError(
            f"$: a mixture of {count} experts, but none of {', '.join(EXPERTS['expert_ffn'])} is there: give their "
            "width by --expert-ffn"
        )
    if "dense_layers" not in given:
        _refuse_other_layers(config)
    shared = found["shared_ffn"]
    if shared is None:
        shared = (_first(config, SHARED) or 0) * found["expert_ffn"]
    return Experts(count, found["experts_per_token"], found["expert_ffn"], shared, found["dense_layers"] or 0)


def _refuse_other_layers(config: Document) -> None:
    """Experts in some layers only, which `dense_layers` can say roughly."""
    for name in EVERY:
        if _first(config, (name,)) not in (None, 0, 1):
            raise FormatError(
                f"$.{name}: one layer of {config[name].whole()} has experts, weft plans them in every one: give the "
                "number of layers that have none by --dense-layers, they count as the first ones"
            )
    if "mlp_only_layers" in config and config["mlp_only_layers"].value:
        raise FormatError(
            "$.mlp_only_layers: some layers have no experts: give their number by --dense-layers, they count as the "
            "first ones"
        )


def _refuse_unknown_experts(config: Document) -> None:
    """Experts under names that are not known must not be counted as a dense model."""
    if not isinstance(config.value, dict):
        return
    members = dict(config.value)
    for part, inner in config.value.items():
        if isinstance(inner, dict):
            members |= {f"{part}.{name}": value for name, value in inner.items()}
    names = [name for name, value in members.items() if value and _tells_of_experts(name)]
    if names:
        raise FormatError(
            f"$.{names[0]}: this is a mixture of experts, but none of {', '.join(EXPERTS['experts'])} says of how "
            "many: give --experts, --experts-per-token and --expert-ffn, or --experts 1 if it has none"
        )


def _tells_of_experts(name: str) -> bool:
    words = name.lower().replace(".", "_").split("_")
    return any(word in ("expert", "experts", "moe") for word in words)


def _latent(config: Document) -> Latent | None:
    """Keys and values from a narrow vector, as DeepSeek's models have them."""
    width = _first(config, ("kv_lora_rank",))
    if width is None:
        return None
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = [_first(config, (name,)) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if size is None:
            raise FormatError(f"$: kv_lora_rank says that keys are latent, but {name} is missing")
    plain, rotated, value = (size or 0 for size in sizes)
    return Latent(_first(config, ("q_lora_rank",)) or 0, width, plain, rotated, value)


def _gated(given: Document) -> bool:
    """By the type of the model, or by an activation that only gates have."""
    kind, activation = (
        given[name].text() if name in given and given[name].value is not None else ""
        for name in ("model_type", "hidden_act")
    )
    return kind in GATED or activation in ("silu", "swiglu")
