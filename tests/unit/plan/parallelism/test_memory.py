"""What ranks need, against the formulas that papers print."""

from __future__ import annotations

import pytest

from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import activation_bytes, copies, held, memory_of
from weft.plan.parallelism.shares import shares

GPT3 = Sizes(96, 12288, 96, 4 * 12288, 51200, 2048)
JOB = Job(GPT3, 64, "fp16", fused_attention=False)
SBH = 2048 * 12288


def first(division: Division):
    return shares(GPT3.layers, division, 0.0).part(0)


def test_sixteen_bytes_of_adam():
    """arXiv 1910.02054, section 3.1: 2 + 2 + 12 bytes a parameter, with gradients in 16 bits."""
    found = memory_of(Job(GPT3, 64, "fp16", gradient_bytes=2), Division())
    assert found.lasting == 16 * GPT3.parameters
    assert memory_of(Job(GPT3, 64, "fp32"), Division()).lasting == 16 * GPT3.parameters


def test_what_replicas_share():
    alone, states, all_of_it = (
        memory_of(JOB, Division(data=8, sharded=sharded)) for sharded in ("none", "optimizer", "parameters")
    )
    assert states.states == alone.states / 8 and states.gradients == alone.gradients
    assert all_of_it.gradients == alone.gradients / 8 and all_of_it.parameters < alone.parameters / 4


@pytest.mark.parametrize("sharded", ["none", "optimizer", "parameters"])
def test_gradients_are_there_twice_when_replicas_add_them_up(sharded):
    """At the end of the backward pass, when no activations are: the larger of both counts."""
    little = Job(Sizes(8, 2048, 16, 8192, 1000, 128), 8)
    division = Division(data=8, sharded=sharded, recompute="full")
    plain, found = memory_of(little, division), memory_of(little, division, copied=True)
    copied = 0 if sharded == "parameters" else plain.gradients
    assert plain.activations + plain.moment < plain.gradients / 2 or not copied
    assert found.total == pytest.approx(
        plain.lasting + plain.reserved + max(copied, plain.activations + plain.moment)
    )
    assert memory_of(little, Division(), copied=True) == memory_of(little, Division()), "there is one"
    much, division = Job(Sizes(8, 256, 4, 1024, 1000, 2048), 8), Division(data=2, sharded=sharded)
    assert memory_of(much, division, copied=True) == memory_of(much, division), "activations are more"


@pytest.mark.parametrize(
    ("cluster", "copied"), [("1x2xcpu:1", False), ("2x2xcpu:1", True), ("1x8xA100-80", True)]
)
def test_processors_of_one_host_add_gradients_up_where_they_are(cluster, copied):
    assert copies(parse_cluster(cluster)) is copied


@pytest.mark.parametrize(("chunks", "factor"), [(1, 1.0), (3, 1 + 7 / 24)])
def test_the_first_stage_of_korthikanti(chunks, factor):
    """arXiv 2205.05198, section 4.2.3: L layers of 34 s b h / t in all, (1 + (p - 1) / (p v)) times with chunks; and
    section 4.3: s b h p / t for the embedding."""
    schedule = "1f1b" if chunks == 1 else "interleaved_1f1b"
    division = Division(1, 8, 8, chunks, schedule=schedule, recompute="selective")
    expected = (96 * 34 * SBH / 8 + SBH * 8 / 8) * factor
    assert activation_bytes(JOB, division, first(division)) == pytest.approx(expected)


def test_all_of_korthikanti_without_a_pipeline():
    """Section 4.3, p = 1: s b h L / t (34 + 5 a s / h) + s b h / t + 4 s b h / t (1 + v / h)."""
    division = Division(tensor=8)
    expected = SBH / 8 * (96 * (34 + 80) + 1 + 4 * (1 + 51200 / 12288))
    assert activation_bytes(JOB, division, first(division)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "expected"),
    [("gpipe", 12, 12), ("1f1b", 12, 4), ("1f1b", 2, 2), ("zbv", 12, 4), ("zb_2p", 12, 7)],
)
def test_microbatches_held(schedule, microbatches, expected):
    assert held(Division(pipeline=4, schedule=schedule), microbatches) == expected


def test_the_last_rank_may_be_the_fullest():
    """Its logits are kept in 32 bits: four bytes for each token and word of the vocabulary."""
    wide = Job(Sizes(8, 1024, 8, 4096, 256000, 2048, tied=False), 8)
    found, division = shares(8, Division(pipeline=2), 0.0), Division(pipeline=2)
    assert activation_bytes(wide, division, found.part(1)) > 4 * 2048 * 256000
    assert memory_of(wide, division).activations == activation_bytes(wide, division, found.part(1))
    tied = memory_of(Job(Sizes(8, 1024, 8, 4096, 256000, 2048), 8), division)
    assert tied.parameters == 2 * (4 * wide.sizes.layer_parameters + wide.sizes.table_parameters)
