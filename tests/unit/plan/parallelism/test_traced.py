"""Traced models over machines: their plans are what the simulation takes, and what does not fit falls out."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.graph import Graph, Unit
from weft.machines.catalogue import host_of
from weft.machines.host import Conduct, Host, Machines
from weft.plan.parallelism.traced import traced_search
from weft.schedule import make
from weft.simulate import StageCost, simulate
from weft.topology.cluster import Link

MIB = 2**20
GRAPH = Graph(Unit(f"u{i}", 10.0, 20.0, 100 * MIB, 30 * MIB, MIB) for i in range(8))
FREE = Conduct(tensor=0.0, data=0.0, parameters=0.0)
HOST = Host("h", host_of("T4").accelerator, 4, Link(), Link(), conduct=FREE)


def test_a_pipeline_takes_what_the_simulation_takes():
    found = traced_search(GRAPH, Machines(HOST, 1), 8, 15e9)
    plan = next(
        one for one in found.best if one.division.pipeline == 4 and one.division.schedule == "interleaved"
    )
    made = make("interleaved", 4, 8)
    step = simulate(made.ranks, made.rank_of_stage, [StageCost(0.02, 0.04)] * 4)
    assert plan.step.work + plan.step.bubble == pytest.approx(step.step_s)
    assert plan.memory.activations == 4 * 2 * 30 * MIB


def test_replicas_add_up_over_the_network():
    """Two hosts of four: a ring of eight over the cards of each host, 2 x 7 / 8 of 800 MiB."""
    host = Host("h", HOST.accelerator, 4, Link(), Link(0.0, 1e9), conduct=Conduct(0.0, 0.0, 0.0, 1.0))
    found = traced_search(GRAPH, Machines(host, 2), 8, 15e9)
    plan = found.of_kind["data"]
    assert plan.step.exposed == pytest.approx(2 * 7 / 8 * 800 * MIB / 4e9)


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
