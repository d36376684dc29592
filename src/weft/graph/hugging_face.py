"""The sizes of a transformer from the `config.json` that Hugging Face's models come with."""

from __future__ import annotations

from weft.document import Document
from weft.errors import FormatError
from weft.foreign import parse_json
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
)
"""Types of models whose feed-forward layers have a gate."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def sizes_from_config(text: str, **given: int) -> Sizes:
    """The sizes that a `config.json` describes.

    Args:
        text: What the file holds.
        given: Sizes by the names of `NAMES` that win over the file's, or stand in for those that it lacks. Without
            `seq` a sequence has as many tokens as the model takes.

    Raises:
        FormatError: It is not JSON, lacks a size, or describes a mixture of experts or of several models.

    >>> gpt2 = '{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_ctx": 1024}'
    >>> sizes_from_config(gpt2).parameters
    124438272
    """
    config = Document(parse_json(text, "this is not JSON, so it cannot be a config.json"))
    for name in EXPERTS:
        if name in config and config[name].value not in (None, 0, 1):
            raise FormatError(
                f"$.{name}: this is a mixture of {config[name].whole()} experts, which cannot be planned yet; give the "
                "sizes of a dense model by --layers, --hidden, --heads, --ffn, --vocab, --seq"
            )
    found = {size: given.get(size) or _first(config, names) for size, names in NAMES.items()}
    if found["ffn"] is None and found["hidden"] is not None:
        found["ffn"] = 4 * found["hidden"]
    for size in ("layers", "hidden", "heads", "vocab", "seq"):
        if found[size] is None:
            raise FormatError(
                f"$: no {size}: none of {', '.join(NAMES[size])} is there; give it by --{size}"
                + (", or use the config.json of one of its parts" if "text_config" in config else "")
            )
    tied = "tie_word_embeddings" not in config or config["tie_word_embeddings"].value is not False
    return Sizes(**found, gated=_gated(config), tied=tied)  # type: ignore[arg-type]  # none of the five is None


def _first(given: Document, names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if name in given and given[name].value is not None), None)
    return None if name is None else given[name].whole()


def _gated(given: Document) -> bool:
    """By the type of the model, or by an activation that only gates have."""
    kind, activation = (
        given[name].text() if name in given and given[name].value is not None else ""
        for name in ("model_type", "hidden_act")
    )
    return kind in GATED or activation in ("silu", "swiglu")
