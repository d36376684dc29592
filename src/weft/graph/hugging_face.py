"""The sizes of a transformer from the `config.json` that Hugging Face's models come with."""

from __future__ import annotations

from collections.abc import Mapping

from weft.document import Document
from weft.errors import FormatError
from weft.graph.experts import Experts, Latent
from weft.graph.sizes import Sizes
from weft.untrusted import parse_json

NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "decoder_ffn_dim"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_width": ("head_dim", "d_kv"),
}
"""What each size is called, in the order in which names are looked for."""
ENCODER, DECODER = ("encoder_layers", "num_layers"), ("decoder_layers", "num_decoder_layers")
"""The layers of models with both."""
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
NO_CONFIG = "this is not JSON, so it cannot be a config.json"
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

    Of several models (`text_config` beside `vision_config`) it is the text model; see `parts_left_out`.

    An encoder with a decoder (T5, Raffel et al., arXiv 1910.10683; BART) counts as the layers of both, each over `seq`
    tokens. A decoder's second attention has 4 h a d parameters (Vaswani et al., arXiv 1706.03762, section 3.2.3) and
    counts as feed-forward width with as many, spread over all layers; its scores are not counted.

    A vision transformer (Dosovitskiy et al., arXiv 2010.11929, section 3.1) reads (image / patch)^2 patches and one
    token more; the projection of c patch^2 numbers counts as a vocabulary of so many, its head is not counted.

    Args:
        text: What the file holds.
        given: Sizes by the names of `NAMES` and `EXPERTS` that win over the file's, or stand in for those that it
            lacks. Without `seq` a sequence has as many tokens as the model takes.

    Raises:
        FormatError: It is not JSON, lacks a size, or describes experts that lie otherwise than in all layers after the
            first ones.

    >>> gpt2 = '{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_ctx": 1024}'
    >>> sizes_from_config(gpt2).parameters
    124438272
    """
    config = _text_part(Document(parse_json(text, NO_CONFIG)))
    found = {size: given.get(size) or _first(config, names) for size, names in NAMES.items()}
    for size, number in {**_pair(config), **_patches(config)}.items():
        found[size] = given.get(size) or number
    if found["ffn"] is None and found["hidden"] is not None:
        found["ffn"] = 4 * found["hidden"]
    for size in ("layers", "hidden", "heads", "vocab", "seq"):
        if found[size] is None:
            raise FormatError(
                f"{config.path}: no {size}: none of {', '.join(NAMES[size])} is there; give it by --{size}"
            )
    latent = _latent(config)
    if latent is not None:
        found["head_width"] = None
        found["kv_heads"] = None
    tied = "tie_word_embeddings" not in config or config["tie_word_embeddings"].value is not False
    experts = _experts(config, given)
    windows = _windows(config, found["layers"] or 0)
    if "ffn" not in given and found["ffn"]:
        found["ffn"] += _second_attention(config, found)
    return Sizes(**found, **windows, gated=_gated(config), tied=tied, experts=experts, latent=latent)  # type: ignore[arg-type]


def parts_left_out(text: str) -> list[str]:
    """The names of the models of a `config.json` that `sizes_from_config` does not count: `vision_config` and others.

    >>> parts_left_out('{"text_config": {"hidden_size": 8}, "vision_config": {"hidden_size": 8}}')
    ['vision_config']
    """
    config = Document(parse_json(text, NO_CONFIG))
    if _text_part(config) is config or not isinstance(config.value, dict):
        return []
    return [
        name
        for name, part in config.value.items()
        if name.endswith("_config") and name != "text_config" and isinstance(part, dict)
        and any(key in part for names in NAMES.values() for key in names)
    ]  # fmt: skip


def _text_part(config: Document) -> Document:
    """The text model of several, else the file itself; what only the file says counts for its text model."""
    if not _has(config, "text_config") or not isinstance(config["text_config"].value, dict):
        return config
    part = config["text_config"]
    if _has(config, "tie_word_embeddings") and not _has(part, "tie_word_embeddings"):
        tied = config["tie_word_embeddings"].value
        return Document({**part.value, "tie_word_embeddings": tied}, part.path)  # type: ignore[dict-item]
    return part


def _pair(config: Document) -> dict[str, int]:
    """The layers of an encoder and its decoder; empty for other models."""
    if not _has(config, "is_encoder_decoder") or not config["is_encoder_decoder"].value:
        return {}
    encoder = _first(config, ENCODER)
    if encoder is None:
        raise FormatError(
            f"{config.path}: the model has an encoder and a decoder, but none of {', '.join(ENCODER)} gives the "
            "encoder's layers"
        )
    return {"layers": encoder + (_first(config, DECODER) or encoder)}


def _second_attention(config: Document, found: Mapping[str, int | None]) -> int:
    """The feed-forward width, in every layer, that has the parameters of the decoder's attention to its encoder."""
    layers = _pair(config).get("layers", 0)
    if not layers or found["hidden"] is None or found["heads"] is None:
        return 0
    decoder = layers - (_first(config, ENCODER) or 0)
    width = found["heads"] * found["head_width"] if found["head_width"] else found["hidden"]
    return 4 * width * decoder // (layers * (3 if _gated(config) else 2))


def _patches(config: Document) -> dict[str, int]:
    """The sequence and the vocabulary that stand for the patches of a vision transformer; empty for other models."""
    image, patch = (_first(config, (name,)) for name in ("image_size", "patch_size"))
    if not image or not patch:
        return {}
    channels = _first(config, ("num_channels",)) or 3
    return {"seq": (image // patch) ** 2 + 1, "vocab": channels * patch**2}


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
    names = [name for name, value in members.items() if value and _names_experts(name)]
    if names:
        raise FormatError(
            f"$.{names[0]}: this is a mixture of experts, but none of {', '.join(EXPERTS['experts'])} says of how "
            "many: give --experts, --experts-per-token and --expert-ffn, or --experts 1 if it has none"
        )


def _names_experts(name: str) -> bool:
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
    forward = given["feed_forward_proj"].text() if _has(given, "feed_forward_proj") else ""
    return kind in GATED or activation in ("silu", "swiglu") or forward.startswith("gated")
