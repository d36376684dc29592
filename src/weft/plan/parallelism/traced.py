"""A traced model over machines: replicas and pipelines of its own units, whose times were measured.

The times are those of the device on which the model was traced, for the microbatch with which it was: machines of that
kind are meant. Units are placed for each length of the pipeline so that the busiest rank is as small as possible; the
other terms are those of `weft.plan.parallelism.step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.graph.model import Graph
from weft.machines.host import Machines
from weft.partition.chain.exact import exact
from weft.partition.problem import Problem
from weft.plan.parallelism.job import Division
from weft.plan.parallelism.layer import LayerTimes, Times, all_reduce_s, gather_s
from weft.plan.parallelism.memory import RESERVED, Memory, held
from weft.plan.parallelism.search import Found, Plan, divisors, keep
from weft.plan.parallelism.step import Step, bubble_s, crossing_rounds
from weft.plan.stages import stages_in
from weft.simulate import StageCost

NOTHING = LayerTimes(Times(), Times(), Times(), Times(), 0.0)
"""A traced model's work is not divided into products and the rest."""
MOMENTS = 2
"""Copies of the parameters that the optimizer keeps: the two moments of an Adam-like one."""


@dataclass(frozen=True)
class Rank:
    """What the ranks of a pipeline take of a microbatch, and the most that one has of each thing, in bytes."""

    busiest: Times
    mean: Times
    parameter_bytes: int
    activation_bytes: int
    crossing_bytes: int


def traced_search(graph: Graph, machines: Machines, microbatches: int, limit_bytes: float) -> Found:
    """The fastest ways to run a traced model on all of some machines.

    Args:
        graph: The model, traced with one microbatch.
        machines: Where: of the kind on which it was traced.
        microbatches: How many microbatches all replicas together run in a step.
        limit_bytes: What of a device may be used.

    Raises:
        ConfigError: No number of replicas divides the microbatches.

    >>> from weft.graph import Unit
    >>> from weft.machines.cluster import parse_cluster
    >>> graph = Graph(Unit(f"u{i}", 1.0, 2.0, 2**20, 2**20) for i in range(8))
    >>> traced_search(graph, parse_cluster("4xT4"), 32, 15e9).best[0].kind
    'sharded'
    """
    found = Found()
    for pipeline in divisors(machines.size):
        data = machines.size // pipeline
        if pipeline > len(graph):
            found.refuse(f"more pipeline ranks than the {len(graph)} units")
        elif microbatches % data:
            found.refuse(f"{data} replicas do not divide {microbatches} microbatches")
        else:
            rank = _rank(graph, pipeline)
            for division in _variants(data, pipeline):
                keep(found, _plan(division, rank, machines, microbatches // data), limit_bytes, "fp32")
    if not found.tried:
        raise ConfigError(
            f"{machines.size} accelerators cannot divide {microbatches} microbatches ({'; '.join(found.refused)}): "
            f"give a number that {machines.size} divides"
        )
    return found


def _variants(data: int, pipeline: int) -> Iterator[Division]:
    for schedule in ("interleaved", "zb_h1") if pipeline > 1 else ("interleaved",):
        for sharded in ("none", "optimizer") if data > 1 else ("none",):
            for recompute in ("none", "full"):
                yield Division(data, 1, pipeline, sharded=sharded, schedule=schedule, recompute=recompute)


def _rank(graph: Graph, ranks: int) -> Rank:
    stages = stages_in(exact(Problem(graph, ranks))).stages
    times = [_times(stage) for stage in stages]
    whole = Times(*(sum(getattr(one, name) for one in times) for name in ("forward", "inputs", "weights")))
    return Rank(
        max(times, key=lambda one: one.total),
        whole.times(1 / ranks),
        max(stage.parameter_bytes for stage in stages),
        max(stage.activation_bytes for stage in stages),
        max(stage.forward_bytes for stage in stages),
    )


def _times(stage: StageCost) -> Times:
    halves = stage.input_s + stage.weight_s or 1.0
    return Times(
        stage.forward_s, stage.backward_s * stage.input_s / halves, stage.backward_s * stage.weight_s / halves
    )


def _plan(division: Division, rank: Rank, machines: Machines, microbatches: int) -> Plan:
    again = Times(inputs=rank.busiest.forward) if division.recompute == "full" else Times()
    busiest, mean = rank.busiest.plus(again), rank.mean.plus(again)
    conduct, device = machines.host.conduct, machines.host.accelerator
    ring = machines.ring(division.data, 1)
    if division.sharded == "none":
        exchanged = all_reduce_s(rank.parameter_bytes, division.data, ring)
    else:
        exchanged = 2 * gather_s(rank.parameter_bytes, division.data, ring)
    exposed = max(exchanged * (1 - conduct.data), exchanged - microbatches * busiest.total)
    crossing = machines.hop_s(rank.crossing_bytes, division.data) + conduct.crossing_s
    shared = division.data if division.sharded == "optimizer" else 1
    step = Step(
        NOTHING,
        busiest,
        microbatches,
        bubble_s(division, busiest, mean, microbatches),
        crossing_rounds(division, microbatches) * crossing if division.pipeline > 1 else 0.0,
        exposed,
        exchanged - exposed,
        device.move_s((2 + 2 * MOMENTS + 1) * rank.parameter_bytes / shared),
        conduct.late(division.ranks),
    )
    many = held(division, microbatches)
    kept = min(rank.crossing_bytes, rank.activation_bytes) if again.inputs else rank.activation_bytes
    memory = Memory(
        rank.parameter_bytes,
        rank.parameter_bytes,
        MOMENTS * rank.parameter_bytes / shared,
        many * kept,
        rank.activation_bytes if again.inputs else 0.0,
        min(RESERVED, 0.1 * device.memory_bytes),
    )
    return Plan(division, step, memory)
