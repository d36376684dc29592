"""Traced models over machines: their plans are what the simulation takes, and what does not fit falls out."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import ConfigError
from weft.graph import Graph, Unit
from weft.machines.catalogue import host_of
from weft.machines.host import Conduct, Host, Machines
from weft.plan.measured.cut_units import shard_units
from weft.plan.parallelism.job import Division
from weft.plan.parallelism.memory import held
from weft.plan.parallelism.stage_costs import traced_stage_costs
from weft.plan.parallelism.traced import rank_costs, traced_plan, traced_search
from weft.schedule import make
from weft.simulate import StageCost, simulate
from weft.topology.cluster import Link

MIB = 2**20
GRAPH = Graph(Unit(f"u{i}", 10.0, 20.0, 100 * MIB, 30 * MIB, MIB) for i in range(8))
FREE = Conduct(tensor=0.0, data=0.0, parameters=0.0)
HOST = Host("h", host_of("T4").accelerator, 4, Link(), Link(), conduct=FREE)


def test_a_pipeline_takes_what_the_simulation_takes():
    found = traced_search(GRAPH, Machines(HOST, 1), 8, 15e9)
    plan = next(one for one in found.best if one.division.pipeline == 4 and one.division.schedule == "1f1b")
    made = make("1f1b", 4, 8)
    step = simulate(made.ranks, made.rank_of_stage, [StageCost(0.02, 0.04)] * 4)
    assert plan.step.work + plan.step.bubble == pytest.approx(step.step_s)
    assert plan.memory.activations == 4 * 2 * 30 * MIB


def test_a_rank_holds_as_many_microbatches_as_its_place_says():
    """The last rank's large logits wait for one microbatch, not for as many as the first rank holds."""
    units = [Unit(f"u{i}", 10.0, 20.0, 10 * MIB, MIB if i < 3 else 100 * MIB, MIB) for i in range(4)]
    division = Division(pipeline=4)
    found = traced_plan(Graph(units), division, Machines(HOST, 1), 8).memory
    assert (found.activations, found.parameters) == (100 * MIB, 10 * MIB)


def test_blocks_that_are_computed_again_keep_their_inputs():
    """Two blocks of two units, and a head outside of blocks: 2 x 8 MiB of inputs, and what the head keeps."""
    names = ["blocks.0.a", "blocks.0.b", "blocks.1.a", "blocks.1.b", "head"]
    units = [Unit(name, 10.0, 20.0, 0, 30 * MIB, 8 * MIB) for name in names]
    division = Division(data=2, recompute="full")
    found = traced_plan(Graph(units), division, Machines(HOST, 1), 8).memory
    assert (found.activations, found.moment) == ((8 + 30) * MIB, 60 * MIB)
    step = traced_plan(Graph(units), division, Machines(HOST, 1), 8).step
    assert step.busiest.total == pytest.approx(5 * 0.04)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
def test_microbatches_held_are_those_of_the_schedules(schedule, ranks):
    """The most that each rank of weft's own schedules has between a forward pass and its last backward pass."""
    made = make(schedule, ranks, 8)
    chunks = len(made.rank_of_stage) // ranks
    division = Division(pipeline=ranks, chunks=chunks, schedule=schedule)
    for place, actions in enumerate(made.ranks):
        there = most = 0
        for action in actions:
            there += {"F": 1, "B": -1, "W": -1}.get(str(action)[len(str(action.stage))], 0)
            most = max(most, there)
        assert most / chunks == pytest.approx(held(division, 8, place))


def test_replicas_add_up_over_the_network():
    """Two hosts of four: a ring of eight over the cards of each host, 2 x 7 / 8 of 800 MiB."""
    host = Host("h", HOST.accelerator, 4, Link(), Link(0.0, 1e9), conduct=Conduct(0.0, 0.0, 0.0, 1.0))
    found = traced_search(GRAPH, Machines(host, 2), 8, 15e9)
    plan = found.of_kind["data"]
    assert plan.step.exposed == pytest.approx(2 * 7 / 8 * 800 * MIB / 4e9)


def test_a_rank_to_which_microbatches_come_back_counts_all_its_stages():
    """Embedding and head share a matrix, so they lie together: three stages on two ranks."""
    units = [
        Unit("embedding", 1.0, 2.0, 8 * MIB, 2 * MIB, MIB, group="table"),
        *(Unit(f"blocks.{i}", 10.0, 20.0, 4 * MIB, MIB, MIB) for i in range(3)),
        Unit("head", 9.0, 18.0, 0, 6 * MIB, MIB, group="table"),
    ]
    placement, found = rank_costs(Graph(units), 2)
    assert placement.partitions[0] == placement.partitions[-1]
    assert sum(one.forward_s for one in found) == pytest.approx(0.04)
    ends = found[placement.partitions[0]]
    assert ends.parameter_bytes >= 8 * MIB and ends.activation_bytes >= 8 * MIB
    for recompute in ("none", "full"):
        plan = traced_plan(Graph(units), Division(pipeline=2, recompute=recompute), Machines(HOST, 1), 8)
        assert plan.step.busiest.forward == pytest.approx(max(one.forward_s for one in found))
    costs = traced_stage_costs(Graph(units), Machines(HOST, 1), Division(pipeline=2))
    assert [one.forward_s for one in costs] == [one.forward_s for one in found]


def test_ranks_that_cut_layers_have_parts_of_them_and_wait_for_sums():
    """Two blocks of three quarters to cut over two ranks; 10 MB of sums at 1 GB/s take 10 ms in each pass."""
    host = Host("h", HOST.accelerator, 4, Link(0.0, 1e9), Link(), conduct=FREE)
    cut: dict[str, Any] = {"cut_share": 0.75, "cut_bytes": 10**7, "cut_ranks": 2}
    graph = Graph(Unit(f"u{i}", 40.0, 80.0, 100 * MIB, 34 * MIB, MIB, **cut) for i in range(2))
    plan = traced_plan(graph, Division(2, 2, along=False), Machines(host, 1), 4)
    one = 0.625 * 0.04 + 0.01
    assert plan.step.busiest.forward == pytest.approx(2 * one)
    assert plan.step.busiest.total == pytest.approx(2 * (0.625 * 0.12 + 0.02))
    assert plan.memory.parameters == 125 * MIB
    assert plan.memory.activations == pytest.approx(2 * (34 - 0.375 * 24) * MIB, rel=1e-6)
    found = traced_search(graph, Machines(host, 1), 4, 15e9)
    assert {one.division.tensor for one in found.best} == {1, 2}
    assert not any(one.division.along and one.division.tensor > 1 for one in found.best)


def test_what_ranks_cut_together_lies_on_one_partition():
    """Four linears, each two between which tensors are in parts: three are no place to cut a pipeline at."""
    units = [
        Unit(f"u{i}", t, 2 * t, MIB, MIB, MIB, cut_share=1.0, cut_ranks=2, cut_group=f"pair{i // 2}")
        for i, t in enumerate((1.0, 1.0, 1.0, 9.0))
    ]
    whole, _ = rank_costs(Graph(units), 2)
    assert whole.partitions == (0, 0, 0, 1)
    parts, _ = rank_costs(shard_units(Graph(units), 2, Link()), 2)
    assert parts.partitions == (0, 0, 1, 1)


def test_what_does_not_fit_falls_out():
    found = traced_search(GRAPH, Machines(HOST, 1), 8, 3.5e9)
    assert found.too_large and found.best and all(one.memory.total <= 3.5e9 for one in found.best)
    assert all(one.division.pipeline > 1 for one in found.best if one.division.sharded == "none")
    none = traced_search(GRAPH, Machines(HOST, 1), 8, 1e9)
    assert not none.best and none.nearest is not None


def test_microbatches_that_nothing_divides():
    with pytest.raises(
        ConfigError, match="16 accelerators cannot divide 3 microbatches .*: give a number that 16 divides"
    ):
        traced_search(GRAPH, Machines(HOST, 4), 3, 15e9)
