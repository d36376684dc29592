"""The cost of each stage of a plan's pipeline, for a simulation of its step.

The formulas of a step know the busiest rank and the mean of all; a timeline needs every stage.
"""

from __future__ import annotations

from dataclasses import replace

from weft.graph.model import Graph
from weft.machines.host import Machines
from weft.plan.measured.cut_units import shard_units
from weft.plan.parallelism.job import Division, Job
from weft.plan.parallelism.step import StepTimes
from weft.plan.parallelism.traced import rank_costs
from weft.simulate import StageCost


def stage_costs(job: Job, machines: Machines, division: Division) -> list[StageCost]:
    """Times of one microbatch by stage: layers as `shares` has them, the head on the last stage.

    >>> from weft.graph.sizes import Sizes
    >>> from weft.machines.cluster import parse_cluster
    >>> job = Job(Sizes(layers=8, hidden=512, heads=8, ffn=2048, vocab=50000, seq=512), batch=16)
    >>> first, last = stage_costs(job, parse_cluster("2xA100-80"), Division(pipeline=2))
    >>> first.forward_s / last.forward_s < 1.5
    True
    """
    known = StepTimes(job, machines)
    layer, head = known.of(division)
    times = [layer.total.times(share) for share in known.shares(division).stages]
    times[-1] = times[-1].plus(head)
    return [StageCost(each.forward, each.backward, each.inputs, each.weights) for each in times]


def traced_stage_costs(graph: Graph, machines: Machines, division: Division) -> list[StageCost]:
    """The same of a traced model, whose units are placed so that the busiest rank is as small as possible."""
    parts = shard_units(graph, division.tensor, machines.ring(division.tensor, 1))
    _, stages = rank_costs(parts, division.pipeline)
    if division.recompute == "none":
        return list(stages)
    return [
        replace(one, backward_s=one.backward_s + one.forward_s, input_s=one.input_s + one.forward_s)
        for one in stages
    ]
