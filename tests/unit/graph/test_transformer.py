"""Described transformers against the figures that the papers print."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.graph import transformer


def megatron(layers, hidden, heads, **more):
    """A model of arXiv 2104.04473 and arXiv 2205.05198: vocabulary 51,200, sequence 2048."""
    return transformer(layers, hidden, heads, 4 * hidden, 51200, 2048, **more)


@pytest.mark.parametrize(
    ("billions", "heads", "hidden", "layers"),
    [
        (1.7, 24, 2304, 24),
        (3.6, 32, 3072, 30),
        (7.5, 32, 4096, 36),
        (18.4, 48, 6144, 40),
        (39.1, 64, 8192, 48),
        (76.1, 80, 10240, 60),
        (145.6, 96, 12288, 80),
        (310.1, 128, 16384, 96),
        (529.6, 128, 20480, 105),
        (1008.0, 160, 25600, 128),
        (174.6, 96, 12288, 96),
    ],
)
def test_parameters_of_table_1(billions, heads, hidden, layers):
    """arXiv 2104.04473, table 1, and its 175B model."""
    graph = megatron(layers, hidden, heads)
    assert round(sum(unit.parameters for unit in graph) / 1e9, 1) == billions
    assert all(unit.parameter_bytes == 4 * unit.parameters for unit in graph)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(96, 12288, 96), (24, 2304, 24)])
def test_flops_of_equation_3(layers, hidden, heads):
    """arXiv 2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) with all activations computed again."""
    graph = megatron(layers, hidden, heads, batch=2, flops_per_s=1e15, recompute="full")
    flops = sum(unit.time_ms for unit in graph) / 1e3 * 1e15
    s, vocab = 2048, 51200
    ratio = 1 + s / (6 * hidden) + vocab / (16 * layers * hidden)
    assert flops == pytest.approx(96 * 2 * s * layers * hidden**2 * ratio)


def test_training_time_of_the_175b_model():
    """arXiv 2104.04473: 300 billion tokens on 1024 GPUs at 140 teraFLOP/s take 34 days (small terms left out)."""
    graph = megatron(96, 12288, 96, recompute="full")
    seconds = sum(unit.time_ms for unit in graph) / 1e3 * 300e9 / 2048 / 1024
    assert seconds / 86400 == pytest.approx(34, rel=0.03)


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "batch", "scores", "saved"),
    [(12288, 96, 96, 1, 80, 0.70), (20480, 128, 105, 1, 64, 0.65)],
)
def test_activation_memory(hidden, heads, layers, batch, scores, saved):
    """arXiv 2205.05198: s b h (34 + 5 a s / h) a layer; 5 a s / h is 80 for GPT-3 and 64 for MT-NLG, so that
    selective recomputation saves 70 % and 65 %; full recomputation leaves 2 s b h."""
    sbh = 2048 * batch * hidden
    kept = {
        how: megatron(layers, hidden, heads, batch=batch, recompute=how).units[1].activation_bytes
        for how in ("none", "selective", "full")
    }
    assert kept == {"none": sbh * (34 + scores), "selective": sbh * 34, "full": sbh * 2}
    assert round(1 - kept["selective"] / kept["none"], 2) == saved


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "more"), [(12288, 96, 96, 2.7), (20480, 128, 105, 1.6)]
)
def test_flops_of_selective_recomputation(hidden, heads, layers, more):
    """arXiv 2205.05198, section 5: the attention that is computed again has 2.7 % and 1.6 % of the FLOPs."""
    times = {}
    for how in ("none", "selective"):
        block = megatron(layers, hidden, heads, recompute=how).units[1]
        times[how] = block.time_ms
    again = times["selective"] - times["none"]
    assert 100 * 3 * again / times["none"] == pytest.approx(more, abs=0.06)


def test_head_and_embedding():
    graph = transformer(2, 8, 2, 16, 100, 4, batch=3)
    embedding, head = graph.units[0], graph.units[-1]
    assert [unit.name for unit in graph] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert (embedding.parameters, head.parameters) == (100 * 8 + 4 * 8, 0)
    assert embedding.group == head.group is not None
    assert head.activation_bytes == 4 * 4 * 3 * 8 * (1 + 100 / 8)
    assert embedding.activation_bytes == 4 * 3 * 8
    assert embedding.output_bytes == 2 * 4 * 3 * 8
    untied = transformer(2, 8, 2, 16, 100, 4, tied=False)
    assert untied.units[-1].parameters == 800 and untied.groups == {}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layers": 0, "seq": 0}, "layers is 0, it must be at least 1; seq is 0, it must be at least 1"),
        ({"batch": 0}, "batch is 0, it must be at least 1"),
        ({"flops_per_s": 0.0}, "flops_per_s is 0.0, it must be a number above 0"),
        ({"recompute": "half"}, 'recompute is "half", it must be one of none, selective, full'),
    ],
)
def test_faults(arguments, text):
    sizes = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 8, "seq": 8}
    with pytest.raises(ConfigError, match=text):
        transformer(**{**sizes, **arguments})
