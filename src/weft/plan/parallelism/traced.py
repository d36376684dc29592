"""A traced model over machines: replicas and pipelines of its own units, whose times were measured, whole or sharded.

The times are those of the device on which the model was traced, for the microbatch with which it was: machines of that
kind are meant. Units are placed for each length of the pipeline so that the busiest rank is as small as possible; the
other terms are those of `weft.plan.parallelism.step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from weft.errors import ConfigError
from weft.graph.model import Graph
from weft.machines.host import Machines
from weft.partition.chain.exact import exact
from weft.partition.placement import Placement
from weft.partition.problem import Problem
from weft.plan.measured.cut_units import degrees, shard_units
from weft.plan.parallelism.job import Division
from weft.plan.parallelism.layer import LayerTimes, Times, all_reduce_s, gather_s
from weft.plan.parallelism.memory import RESERVED, Memory, copies, held, with_copies
from weft.plan.parallelism.search import Found, Plan, divisors, keep
from weft.plan.parallelism.step import Step, bubble_s, crossing_rounds
from weft.plan.stages import stages_in
from weft.simulate import StageCost

NOTHING = LayerTimes(Times(), Times(), Times(), Times(), 0.0)
"""A traced model's work is not divided into products and the rest."""
MOMENTS = 2
"""Copies of the parameters that the optimizer keeps: the two moments of an Adam-like one."""


class Bytes(NamedTuple):
    """The bytes of one rank of a pipeline; of a microbatch what is not parameters.

    Attributes:
        parameters: Parameters.
        activations: What waits for the backward pass.
        kept: What waits where blocks are computed again: their inputs, and all of units outside of blocks.
        again: What the largest block has once it was computed again.
        transient: What a backward pass takes besides, while it runs.
    """

    parameters: int
    activations: int
    kept: int
    again: int
    transient: int = 0


@dataclass(frozen=True)
class Row:
    """The cost of a microbatch on the ranks of a pipeline.

    Attributes:
        busiest: The times of the busiest rank.
        mean: The mean of all.
        crossing_bytes: The most that goes from one stage to the next.
        bytes: What each rank has.
    """

    busiest: Times
    mean: Times
    crossing_bytes: int
    bytes: Sequence[Bytes]

    @property
    def parameter_bytes(self) -> int:
        """Those of the rank that has most."""
        return max(one.parameters for one in self.bytes)


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
    'data'
    """
    found = Found()
    for tensor in degrees(graph, machines.host.accelerators):
        parts = shard_units(graph, tensor, machines.tensor_ring(tensor, along=False))
        for pipeline in divisors(machines.size // tensor) if machines.size % tensor == 0 else ():
            data = machines.size // (pipeline * tensor)
            if pipeline > len(graph):
                found.refuse(f"more pipeline ranks than the {len(graph)} units")
            elif microbatches % data:
                found.refuse(f"{data} replicas do not divide {microbatches} microbatches")
            else:
                row = _row(parts, pipeline)
                for division in _variants(data, tensor, pipeline):
                    keep(found, _plan(division, row, machines, microbatches // data), limit_bytes, None)
    if not found.tried:
        raise ConfigError(
            f"{machines.size} accelerators cannot divide {microbatches} microbatches ({'; '.join(found.refused)}): "
            f"give a number that {machines.size} divides"
        )
    return found


def traced_plan(graph: Graph, division: Division, machines: Machines, microbatches: int) -> Plan:
    """The plan of one division of a traced model, with so many microbatches a replica."""
    parts = shard_units(graph, division.tensor, machines.tensor_ring(division.tensor, along=False))
    return _plan(division, _row(parts, division.pipeline), machines, microbatches)


def _variants(data: int, tensor: int, pipeline: int) -> Iterator[Division]:
    for schedule in ("1f1b", "zb_h1") if pipeline > 1 else ("1f1b",):
        for sharded in ("none", "optimizer") if data > 1 else ("none",):
            for recompute in ("none", "full"):
                yield Division(
                    data,
                    tensor,
                    pipeline,
                    sharded=sharded,
                    schedule=schedule,
                    recompute=recompute,
                    along=False,
                )


def _row(graph: Graph, ranks: int) -> Row:
    placement, stages = rank_costs(graph, ranks)
    times = [_times(stage) for stage in stages]
    whole = Times(*(sum(getattr(one, name) for one in times) for name in ("forward", "inputs", "weights")))
    return Row(
        max(times, key=lambda one: one.total),
        whole.times(1 / ranks),
        max(stage.forward_bytes for stage in stages),
        [
            Bytes(stage.parameter_bytes, stage.activation_bytes, *again, stage.transient_bytes)
            for stage, again in zip(stages, _again(graph, placement.partitions, ranks), strict=True)
        ],
    )


def rank_costs(graph: Graph, ranks: int) -> tuple[Placement, list[StageCost]]:
    """Units placed so that the busiest rank is as small as possible, and what each rank takes: all its stages together.

    Units that share a parameter lie together, so microbatches may come to a rank more than once.
    """
    placement = exact(Problem(graph, ranks))
    placed = stages_in(placement)
    owners = placed.rank_of_stage or tuple(range(ranks))
    found = [StageCost(0.0, 0.0) for _ in range(ranks)]
    for stage, rank in zip(placed.stages, owners, strict=True):
        own = found[rank]
        found[rank] = StageCost(
            *(getattr(own, one.name) + getattr(stage, one.name) for one in fields(StageCost))
        )
        found[rank] = replace(found[rank], transient_bytes=max(own.transient_bytes, stage.transient_bytes))
    return placement, found


def block_of(unit: str) -> str:
    """The block that a unit is in: a model's modules up to the first number in their names; empty outside of blocks.

    >>> block_of("encoder.layers.0.attention.out"), block_of("encoder.norm")
    ('encoder.layers.0', '')
    """
    parts = unit.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return "" if first is None else ".".join(parts[: first + 1])


def _again(graph: Graph, partitions: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """The bytes that wait on each rank where every block is a checkpoint, and those of its largest block.

    A checkpoint keeps the inputs of what it wraps (Chen et al., arXiv 1604.06174).
    """
    names = [block_of(unit.name) for unit in graph]
    kept = [0] * ranks
    sizes: list[dict[str, int]] = [defaultdict(int) for _ in range(ranks)]
    for unit, block, at in zip(graph, names, partitions, strict=True):
        if block:
            sizes[at][block] += unit.activation_bytes
        else:
            kept[at] += unit.activation_bytes
    for source, targets, size in graph.flows:
        into = {(partitions[target], names[target]) for target in targets if names[target]}
        for at, _ in into - {(partitions[source], names[source])}:
            kept[at] += size
    return [(own, max(blocks.values(), default=0)) for own, blocks in zip(kept, sizes, strict=True)]


def _times(stage: StageCost) -> Times:
    halves = stage.input_s + stage.weight_s or 1.0
    return Times(
        stage.forward_s, stage.backward_s * stage.input_s / halves, stage.backward_s * stage.weight_s / halves
    )


def _plan(division: Division, row: Row, machines: Machines, microbatches: int) -> Plan:
    again = Times(inputs=row.busiest.forward) if division.recompute == "full" else Times()
    busiest, mean = row.busiest.plus(again), row.mean.plus(again)
    conduct, device = machines.host.conduct, machines.host.accelerator
    ring = machines.ring(division.data, division.tensor)
    exchanged = all_reduce_s(row.parameter_bytes, division.data, ring)
    if division.sharded != "none":
        gathering = machines.sharing_ring(division.data, division.tensor)
        exchanged += gather_s(row.parameter_bytes, division.data, gathering)
    exposed = max(exchanged * (1 - conduct.data), exchanged - microbatches * busiest.total)
    crossing = machines.hop_s(row.crossing_bytes, division.data * division.tensor) + conduct.crossing_s
    shared = division.data if division.sharded == "optimizer" else 1
    step = Step(
        NOTHING,
        busiest,
        microbatches,
        bubble_s(division, busiest, mean, microbatches),
        crossing_rounds(division, microbatches) * crossing if division.pipeline > 1 else 0.0,
        exposed,
        exchanged - exposed,
        device.move_s((2 + 2 * MOMENTS + 1) * row.parameter_bytes / shared),
        conduct.late(division.ranks),
    )
    reserved, copied = min(RESERVED, 0.1 * device.memory_bytes), copies(machines)
    memory = (
        with_copies(_memory(division, one, held(division, microbatches, place), reserved), division, copied)
        for place, one in enumerate(row.bytes)
    )
    return Plan(division, step, max(memory, key=lambda one: one.total))


def _memory(division: Division, one: Bytes, many: float, reserved: float) -> Memory:
    """The memory of one rank, which holds so many microbatches."""
    shared = division.data if division.sharded == "optimizer" else 1
    again = division.recompute == "full"
    return Memory(
        one.parameters,
        one.parameters,
        MOMENTS * one.parameters / shared,
        many * (min(one.kept, one.activations) if again else one.activations),
        one.transient + (one.again if again else 0.0),
        reserved,
    )
