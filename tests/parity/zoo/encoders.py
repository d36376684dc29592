"""Encoders of text. Their heads are mostly tied to the embedding, and their tokens fill in each other."""

from __future__ import annotations

from .case import LAYERS, VOCABULARY, WIDTH, add, network
from .inputs import classified, masked

bert_sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def bert_like(
    family: str, suffix: str = "ForMaskedLM", types: bool = False, length: int = 10, **settings: object
) -> None:
    """A case with BERT's names of sizes; `settings` come over them (None takes one away)."""
    merged = {key: value for key, value in {**bert_sizes, **settings}.items() if value is not None}
    name = family + suffix
    add(name, network(name, family + "Config", **merged), masked(length=length, types=types))


bert_like("Bert", types=True)
bert_like("Roberta", pad_token_id=1)
bert_like("XLMRoberta", pad_token_id=1)
bert_like("Albert", embedding_size=16, num_hidden_groups=1, types=True)
bert_like("Electra", embedding_size=16)
bert_like("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0)
bert_like("Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0)
bert_like("MPNet", type_vocab_size=None)
bert_like(
    "MobileBert",
    embedding_size=16,
    intra_bottleneck_size=16,
    intermediate_size=32,
    num_feedforward_networks=2,
)
bert_like("ConvBert", embedding_size=16, head_ratio=2, conv_kernel_size=3)
bert_like("RoFormer", embedding_size=16)
bert_like("SqueezeBert", embedding_size=WIDTH)
bert_like("ModernBert", type_vocab_size=None, global_attn_every_n_layers=2, local_attention=4, pad_token_id=0)
bert_like("Longformer", attention_window=[4] * LAYERS, length=12)
bert_like("Esm", type_vocab_size=None, pad_token_id=1, mask_token_id=4, position_embedding_type="rotary")
add(
    "FNetForMaskedLM",
    network(
        "FNetForMaskedLM", "FNetConfig", **{k: v for k, v in bert_sizes.items() if k != "num_attention_heads"}
    ),
    masked(padded=False),
)
add(
    "DistilBertForMaskedLM",
    network(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=WIDTH,
        hidden_dim=2 * WIDTH,
        n_layers=LAYERS,
        n_heads=4,
        max_position_embeddings=64,
    ),
    masked(),
)
add(
    "FunnelForMaskedLM",
    network(
        "FunnelForMaskedLM",
        "FunnelConfig",
        vocab_size=VOCABULARY,
        block_sizes=[2, 2],
        num_decoder_layers=1,
        d_model=WIDTH,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    masked(length=12),
)
add(
    "BertForSequenceClassification",
    network("BertForSequenceClassification", "BertConfig", num_labels=3, **bert_sizes),
    classified(),
)
