"""Adapters on a frozen model: what is trained, what the rest takes, and what that costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.answer import Asked, answer
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.memory import LAYERS_HERE, memory_of, usable_bytes
from weft.plan.parallelism.step import step_of

LLAMA = {
    "33B": Sizes(layers=60, hidden=6656, heads=52, ffn=17920, vocab=32000, seq=512, gated=True, tied=False),
    "65B": Sizes(layers=80, hidden=8192, heads=64, ffn=22016, vocab=32000, seq=512, gated=True, tied=False),
}
"""LLaMA (Touvron et al., arXiv 2302.13971, table 2)."""
SMALL = Sizes(layers=4, hidden=1024, heads=8, ffn=4096, vocab=1000, seq=512)
ONE = Division(recompute="full")
GIB = 2**30


def machines(name: str):
    return parse_cluster(f"1x1x{name}")


@pytest.mark.parametrize(("name", "published_gb", "gpu"), [("33B", 21, "RTX4090"), ("65B", 41, "A6000")])
def test_models_in_four_bits_take_what_was_published(name: str, published_gb: float, gpu: str):
    """Dettmers et al., QLoRA, arXiv 2305.14314: the abstract has 65B on one GPU of 48 GB, and table 1 (models by their
    memory) 21 GB for Guanaco 33B and 41 GB for 65B."""
    job = Job(LLAMA[name], 16, optimizer="adam8bit", lora=16, quantized=4)
    memory = memory_of(job, ONE)
    assert memory.parameters == pytest.approx(published_gb * 1e9, rel=0.12)
    assert (memory.total < usable_bytes(48 * GIB)) and (name == "33B" or memory.total > 40e9)
    whole = memory_of(replace(job, quantized=0), ONE)
    assert whole.total > usable_bytes(machines(gpu).host.accelerator.memory_bytes)


def test_frozen_weights_have_no_gradients_and_no_states():
    full, adapted = (memory_of(Job(SMALL, 16, lora=rank), ONE) for rank in (0, 8))
    trained = 8 * (8 * 1024 + 2 * (1024 + 4096)) * 4
    assert adapted.gradients == 4 * trained and adapted.states == 12 * trained
    assert adapted.parameters == full.parameters + 2 * trained
    assert adapted.activations == full.activations


def test_frozen_weights_have_no_products_of_their_gradients():
    there, one = machines("A100-80"), Division()
    full, adapted = (step_of(Job(SMALL, 64, lora=rank), one, there).layer.products for rank in (0, 1))
    assert adapted.forward == pytest.approx(full.forward, rel=0.15) and adapted.inputs == adapted.forward
    assert adapted.weights < 0.15 * adapted.forward < full.weights


def test_fewer_bits_take_less_memory_and_more_time():
    there = machines("A100-80")
    jobs = [Job(SMALL, 64, lora=8, quantized=bits) for bits in (0, 8, 4)]
    parameters = [memory_of(job, ONE).parameters for job in jobs]
    assert parameters == sorted(parameters, reverse=True) and len({*parameters}) == 3
    steps = [step_of(job, ONE, there).seconds for job in jobs]
    assert steps[0] < steps[2] < steps[1]


def test_states_in_host_memory_leave_the_device_and_cost_a_transfer():
    there, job = machines("A100-80"), Job(SMALL, 64)
    away = replace(job, offload_optimizer=True)
    assert memory_of(away, ONE).states == 0 < memory_of(job, ONE).states
    assert step_of(away, ONE, there).optimizer > 10 * step_of(job, ONE, there).optimizer


def test_weights_in_host_memory_leave_all_but_a_few_layers_of_it():
    there = machines("A100-80")
    for lora in (0, 8):
        job = Job(SMALL, 64, lora=lora)
        away = replace(job, offload_weights=True)
        here = SMALL.layer_parameters * job.linear_bytes * (SMALL.layers - LAYERS_HERE)
        assert memory_of(job, ONE).parameters - memory_of(away, ONE).parameters == pytest.approx(
            here, rel=1e-6
        )
        assert step_of(away, ONE, there).seconds >= step_of(job, ONE, there).seconds


def test_replicas_exchange_the_gradients_of_adapters_only():
    there = parse_cluster("1x8xA100-80")
    full, adapted = (step_of(Job(SMALL, 64, lora=rank), Division(data=8), there) for rank in (0, 8))
    assert adapted.exposed + adapted.beside < 0.2 * (full.exposed + full.beside)


def test_what_would_fit_a_card_of_24_gb_is_named():
    llama = Sizes(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        seq=2048,
        gated=True,
        tied=False,
    )
    found = answer(Asked(Job(llama, 16), machines("RTX4090"), None, None))
    assert not found.search.best
    changes = [what for what, _ in found.changes]
    assert changes[0] == "--lora 16" and "--lora 16 --quantized 4, which weft does not run today" in changes
    assert answer(Asked(Job(llama, 16, lora=16, quantized=4), machines("RTX4090"), None, None)).search.best


@pytest.mark.parametrize(
    ("given", "told"),
    [({"quantized": 4}, "weights of 4 bits cannot be trained: train adapters, --lora 16"),
     ({"lora": 8, "quantized": 3}, "frozen weights have 3 bits, it must be 8 or 4"), ({"lora": -1}, "rank .* is -1")],
)  # fmt: skip
def test_what_cannot_be_is_told(given: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        Job(SMALL, 8, **given)
