"""What follows from the sizes of a transformer, against the figures that papers and models' own pages print."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.graph.experts import Experts, Latent
from weft.graph.sizes import Sizes

GPT3 = Sizes(96, 12288, 96, 4 * 12288, 51200, 2048)
SBH = 2048 * 12288


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        (Sizes(32, 4096, 32, 11008, 32000, 4096, gated=True, tied=False), 6_738_415_616),
        (Sizes(32, 4096, 32, 14336, 128256, 8192, kv_heads=8, gated=True, tied=False), 8_030_261_248),
        (Sizes(80, 8192, 64, 28672, 128256, 8192, kv_heads=8, gated=True, tied=False), 70_553_706_496),
        (Sizes(126, 16384, 128, 53248, 128256, 8192, kv_heads=8, gated=True, tied=False), 405_853_388_800),
    ],
)
def test_parameters_of_llama(sizes, parameters):
    """As the models themselves count; the norm at the end, of h numbers, is the only thing left out."""
    assert sizes.parameters + sizes.hidden == parameters


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_activations_of_korthikanti(tensor):
    """arXiv 2205.05198, table 2: without, and with tensor and sequence parallelism, and what is computed again."""
    scores = 5 * 96 * 2048 / 12288
    kept = GPT3.kept_bytes
    assert kept(2048, tensor=tensor, along=False) == SBH * (10 + 24 / tensor + scores / tensor)
    assert kept(2048, tensor=tensor) == SBH * (34 + scores) / tensor
    assert kept(2048, "selective", tensor, along=False) == SBH * (10 + 24 / tensor)
    assert kept(2048, "selective", tensor) == SBH * 34 / tensor
    assert kept(2048, "full", tensor, along=False) == 2 * SBH


def test_the_ends_of_korthikanti():
    """Section 4.3: s b h / t for the embedding's dropout, 4 s b h / t (1 + v / h) for the head."""
    assert GPT3.embedding_bytes(2048, 8) == SBH / 8
    assert GPT3.head_bytes(2048, 8) == 4 * SBH / 8 * (1 + 51200 / 12288)


def test_flops_of_equation_3():
    """arXiv 2104.04473: 72 B s l h^2 (1 + s / 6 h + V / 12 l h) without what is computed again."""
    h, s, layers = 12288, 2048, 96
    expected = 72 * 64 * s * layers * h**2 * (1 + s / (6 * h) + 51200 / (12 * layers * h))
    assert GPT3.model_flops(64) == pytest.approx(expected)


def test_heads_of_their_own_width():
    sizes = Sizes(2, 2048, 8, 16384, 1000, 128, kv_heads=1, head_width=256, gated=True)
    assert (sizes.query_width, sizes.key_width) == (2048, 256)


def test_all_faults_are_told():
    with pytest.raises(
        ConfigError, match=r"layers is 0, it must be at least 1; ffn is -1, it must be at least 1"
    ):
        Sizes(0, 8, 2, -1, 10, 10)
    with pytest.raises(
        ConfigError, match=r"kv_heads is 3, which must divide heads, 8: each head of keys serves"
    ):
        Sizes(1, 8, 8, 8, 8, 8, kv_heads=3)
    with pytest.raises(
        ConfigError, match="heads is 3, which must divide hidden, 8: each head is hidden / heads"
    ):
        Sizes(1, 8, 3, 8, 8, 8)
    assert Sizes(1, 8, 3, 8, 8, 8, head_width=4).query_width == 12


def test_experts_count_once_each_and_only_some_are_met():
    """Shazeer et al., arXiv 1701.06538: a router of h e numbers, and j of e networks for a token."""
    plain = Sizes(4, 64, 8, 256, 100, 32, gated=True)
    mixed = replace(plain, experts=Experts(8, 2, 96, shared=32, dense_layers=1))
    one = 3 * 64 * 96
    assert mixed.layer_parameters == plain.layer_parameters - 3 * 64 * 256 + 64 * 8 + 3 * 64 * 32 + 8 * one
    assert mixed.parameters - mixed.active_parameters == 3 * 6 * one
    assert mixed.parameters == plain.parameters + 3 * (mixed.layer_parameters - plain.layer_parameters)
    assert (plain.active_parameters, plain.expert_parameters, mixed.dense) == (plain.parameters, 0, plain)
    met = mixed.layer_matrices - plain.layer_matrices
    assert met == 3 * 64 * (2 * 96 + 32) + 64 * 8 - 3 * 64 * 256
    assert mixed.model_flops(1) - plain.model_flops(1) == 3 * 3 * 2 * 32 * met
    kept = mixed.kept_bytes(32) - plain.kept_bytes(32)
    assert kept == 32 * (6 * (2 * 96 + 32 - 256) + 4 * 2 * 64)
    assert mixed.kept_bytes(32, "full") == plain.kept_bytes(32, "full")


def test_experts_like_one_network_cost_what_it_costs():
    """One expert of one, as wide as the network, is the network but for its router."""
    plain = Sizes(4, 64, 8, 256, 100, 32, gated=True)
    alone = replace(plain, experts=Experts(1, 1, 256))
    assert alone.parameters == alone.active_parameters == plain.parameters + 4 * 64


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        ((4, 5, 8), "experts per token is 5, but there are 4 experts"),
        ((0, 1, 0), "experts is 0, it must be at least 1; expert ffn is 0"),
        ((4, 1, 8, -1, -2), "shared ffn is -1, it must be at least 0; dense layers is -2"),
        ((4, 1, 8, 0, 2), "dense layers are 2 of 2 layers: at least one must have experts"),
    ],
)
def test_experts_that_cannot_be(experts, told):
    with pytest.raises(ConfigError, match=told):
        Sizes(2, 8, 2, 8, 8, 8, experts=Experts(*experts))


def test_latent_attention_that_cannot_be():
    with pytest.raises(
        ConfigError, match="latent attention: keys is 0, it must be at least 1; latent attention: value is -1"
    ):
        Latent(0, 0, 8, 4, -1)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 3, 16, 40, 64])
def test_the_share_of_scores_is_that_of_the_mask(window: int, chunked: bool):
    """Counted by pairs, up to the half of each diagonal block that formulas of causal attention leave out."""
    seq = 48
    sizes = Sizes(1, 8, 1, 8, 8, seq, window=window, windowed=1, chunked=chunked)
    pairs = sum(
        (query // window == key // window) if chunked else query - key < window
        for query in range(seq)
        for key in range(query + 1)
    )
    assert sizes.seen_share * seq**2 / 2 == pytest.approx(pairs, abs=seq / 2 + 1e-6)
    assert sizes.seen_share == 1.0 or window < seq
