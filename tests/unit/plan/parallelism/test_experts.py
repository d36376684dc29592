"""Mixtures of experts: times, exchange and memory of what replicas share out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.graph.experts import Experts
from weft.graph.sizes import Sizes
from weft.machines.cluster import parse_cluster
from weft.plan.parallelism.explain import memory_terms, step_terms
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.layer import layer_times, mean_layer_times
from weft.plan.parallelism.memory import memory_of
from weft.plan.parallelism.search import Found, divisions, search
from weft.plan.parallelism.shares import shares
from weft.plan.parallelism.step import rank_parameters, step_of
from weft.plan.parallelism.supported_layouts import cannot, settings

PLAIN = Sizes(8, 2048, 16, 8192, 32000, 2048, gated=True)
MIXED = replace(PLAIN, experts=Experts(8, 2, 4096))
MACHINES = parse_cluster("2x8xA100-80")


def test_a_layer_computes_what_tokens_meet():
    """Two of eight experts, each half as wide as the network that they stand for: its FLOPs, and the router's."""
    dense, mixed = (layer_times(Job(sizes, 64), Division(data=16), MACHINES) for sizes in (PLAIN, MIXED))
    device = MACHINES.host.accelerator
    router = device.product_s(2 * 2048 * 2048 * 8, "bf16")
    assert mixed.products.forward == pytest.approx(dense.products.forward + router)
    assert (mixed.dispatch.total, dense.dispatch.total) == (0.0, 0.0)


def test_few_tokens_for_many_experts_wait_for_their_numbers():
    many = Job(replace(MIXED, experts=Experts(512, 2, 4096)), 64)
    device, found = MACHINES.host.accelerator, layer_times(many, Division(data=16), MACHINES)
    assert found.products.forward >= device.move_s(512 * 3 * 2048 * 4096 * 2)
    shared_out = layer_times(many, Division(data=16, experts=16), MACHINES)
    assert shared_out.products.forward < found.products.forward / 5


def test_eager_experts_start_one_by_one():
    """Eight in place of one group: each of two products starts seven times more."""
    device = MACHINES.host.accelerator
    wide = Sizes(8, 2048, 16, 8192, 32000, 65536, gated=True, experts=Experts(8, 2, 4096))
    together, apart = (
        layer_times(Job(wide, 64, eager=eager), Division(data=16), MACHINES).products.forward
        for eager in (False, True)
    )
    assert apart - together == pytest.approx(2 * 7 * device.half_flops / device.rate("bf16"))


def test_tokens_are_sent_twice_in_each_pass():
    """Seven of eight parts of T j h numbers leave; within a host, and with a ring over two hosts' cards."""
    job = Job(MIXED, 64)
    inside, network = MACHINES.host.inside, MACHINES.host.network
    size = 2048 * 2 * 2048 * 2
    within = layer_times(job, Division(data=16, experts=8), MACHINES).dispatch.forward
    assert within == pytest.approx(2 * (7 / 8 * size / inside.bytes_per_s + 7 * inside.latency_s))
    far = Division(data=2, tensor=8, experts=2, along=False)
    reached = network.bytes_per_s * MACHINES.host.conduct.ring
    across = layer_times(job, far, MACHINES).dispatch.forward
    assert across == pytest.approx(2 * (size / 2 / reached + network.latency_s))
    again = layer_times(job, replace(far, recompute="full"), MACHINES)
    assert again.again >= across and again.dispatch.total == pytest.approx(2 * across)


def test_layers_without_experts_count_as_what_they_are():
    """The first two of eight layers: the mean of their times, none of the experts' parameters, on the first rank."""
    sizes = replace(MIXED, experts=Experts(8, 2, 4096, dense_layers=2))
    job, division = Job(sizes, 64), Division(data=4, pipeline=4, experts=4)
    mean, with_experts, dense = (
        mean_layer_times(job, division, MACHINES).total.total,
        layer_times(job, division, MACHINES).total.total,
        layer_times(Job(PLAIN, 64), division, MACHINES).total.total,
    )
    assert mean == pytest.approx(0.75 * with_experts + 0.25 * dense)
    found = shares(8, division, 0.0, 2)
    assert (found.ranks, found.dense) == ((2, 2, 2, 2), (2, 0, 0, 0))
    first, second = (rank_parameters(job, division, found.part(place)) for place in (0, 1))
    assert (first.experts, second.experts) == (0.0, 2 * sizes.expert_parameters / 4)
    assert first.all == 2 * PLAIN.layer_parameters + PLAIN.embedding_parameters
    assert found.parts[:2] == (found.part(0), found.part(1))


def test_each_replica_has_its_own_experts():
    job = Job(MIXED, 64)
    whole, parts = (memory_of(job, Division(data=8, experts=count)) for count in (1, 8))
    assert whole.parameters - parts.parameters == pytest.approx(2 * 8 * MIXED.expert_parameters * 7 / 8)
    rest = 8 * (MIXED.layer_parameters - MIXED.expert_parameters) + MIXED.embedding_parameters
    states = memory_of(job, Division(data=8, experts=4, sharded="optimizer")).states
    assert states == pytest.approx(12 * (rest / 8 + 8 * MIXED.expert_parameters / 4 / 2))
    full = memory_of(job, Division(data=8, experts=4, sharded="parameters"))
    assert full.gradients == pytest.approx(4 * (rest / 8 + 8 * MIXED.expert_parameters / 8))


def test_experts_are_added_up_by_those_that_have_the_same():
    job, machines = Job(MIXED, 64), parse_cluster("1x8xA100-80")
    whole, shared, apart = (step_of(job, Division(data=8, experts=count), machines) for count in (1, 4, 8))
    exchanged = [step.exposed + step.beside for step in (whole, shared, apart)]
    assert exchanged[0] > exchanged[1] > exchanged[2]
    rest = 8 * (MIXED.layer_parameters - MIXED.expert_parameters) + MIXED.embedding_parameters
    link = machines.host.inside
    assert exchanged[2] == pytest.approx(2 * (7 / 8 * 4 * rest / link.bytes_per_s + 7 * link.latency_s))
    assert exchanged[1] - exchanged[2] == pytest.approx(
        2 * (1 / 2 * 4 * 8 * MIXED.expert_parameters / 4 / link.bytes_per_s + link.latency_s)
    )


def test_the_search_shares_experts_out():
    found = Found()
    every = list(divisions(Job(MIXED, 64), MACHINES, found))
    assert {one.experts for one in every if one.data == 16} == {1, 2, 4, 8}
    assert all(one.experts == 1 for one in divisions(Job(PLAIN, 64), MACHINES, found))
    wide = Job(replace(MIXED, experts=Experts(64, 2, 4096)), 64)
    searched = search(wide, MACHINES)
    best = searched.best[0]
    assert best.division.experts > 1 and best.kind == "hybrid"
    assert cannot(None, best.division) == "" and settings(best.division, 8)["expert_parallel_degree"] > 1
    apart = replace(best.division, context=2)
    assert cannot(None, apart) == "experts shared by replicas are not in weft beside context parallelism"


def test_terms_tell_of_experts():
    job = Job(replace(MIXED, experts=Experts(64, 2, 4096)), 64)
    plan = search(job, MACHINES).best[0]
    told = {name: formula for name, _, formula in (*step_terms(job, plan), *memory_terms(job, plan))}
    assert (
        told["- all-to-all of experts"]
        == f"two in each pass of b s 2 h, over {plan.division.experts} replicas"
    )
    assert "(2 of 64 experts a token)" in told["- products"]
    assert f"{64 // plan.division.experts} of 64 experts" in told["parameters"]
    seconds = {name: value for name, value, _ in step_terms(job, plan)}
    parts = sum(value for name, value in seconds.items() if name.startswith("- "))
    assert parts == pytest.approx(seconds["work"])


def test_experts_that_replicas_cannot_share():
    with pytest.raises(ConfigError, match="experts are shared by 3 replicas, which must divide data, 8"):
        Division(data=8, experts=3)
