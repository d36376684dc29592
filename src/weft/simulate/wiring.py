"""Who waits for whom, worked out once for all microbatches.

A *point* is one of the three things that happen to a microbatch in one of `n` stages:

    point          what                  waits for                          of
    s              F(s)                  F(s - 1)                           s > 0
                                         F(source) of an edge to s
    n + s          B(s) or I(s)          F(s)
                                         B or I of s + 1                    s < n - 1
                                         B or I of target of an edge from s
    2 n + s        W(s)                  I(s)

What one point of a microbatch hands to another stays on the rank, or crosses from one rank to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft.errors import ScheduleError
from weft.schedule.schedule import COMPUTE, Action
from weft.simulate.costs import Edge, Links, StageCost

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Crossing(NamedTuple):
    """A message from one rank to another when a point is done."""

    target: int
    """The point that waits for it."""
    receiver: int
    """The rank of the target."""
    link: str
    shared: bool
    transfer_s: float
    occupied_s: float


class Wiring(NamedTuple):
    """For each point: how much it waits for, and what waits for it."""

    needs: list[int]
    local: list[list[int]]
    crossings: list[list[Crossing]]


def wire(
    rank_of_stage: Sequence[int], costs: Sequence[StageCost], edges: Sequence[Edge], links: Links
) -> Wiring:
    """The wiring of one microbatch; chain and `edges` alike."""
    points = 3 * len(costs)
    wiring = Wiring([0] * points, [[] for _ in range(points)], [[] for _ in range(points)])
    for source, target, size in _arrows(costs, edges):
        sender = rank_of_stage[source % len(costs)]
        receiver = rank_of_stage[target % len(costs)]
        wiring.needs[target] += 1
        if sender == receiver:
            wiring.local[source].append(target)
            continue
        link = links.between(sender, receiver)
        wiring.crossings[source].append(
            Crossing(target, receiver, link.name, link.shared, link.transfer_s(size), link.occupied_s(size))
        )
    return wiring


def _arrows(costs: Sequence[StageCost], edges: Sequence[Edge]) -> Iterator[tuple[int, int, int]]:
    """(point, point that waits for it, bytes)."""
    stages = len(costs)
    for stage, cost in enumerate(costs):
        yield stage, BACKWARD * stages + stage, 0
        yield BACKWARD * stages + stage, WEIGHT * stages + stage, 0
        if stage < stages - 1:
            yield stage, stage + 1, cost.forward_bytes
        if stage > 0:
            yield BACKWARD * stages + stage, BACKWARD * stages + stage - 1, cost.backward_bytes
    for source, target, size in edges:
        yield source, target, size
        yield BACKWARD * stages + target, BACKWARD * stages + source, size


class Program(NamedTuple):
    """A rank's list as numbers."""

    nodes: list[int]
    """For each action microbatch x points + point."""
    durations_s: list[float]

    def reordered(self, numbers: Sequence[int]) -> Program:
        """The actions at these places of the list, in this order."""
        return Program(
            [self.nodes[number] for number in numbers], [self.durations_s[number] for number in numbers]
        )


def compile_rank(
    rank: int, actions: Sequence[Action], rank_of_stage: Sequence[int], costs: Sequence[StageCost]
) -> Program:
    """One rank's list as numbers."""
    stages, points = len(costs), 3 * len(costs)
    table: dict[tuple[int, str], tuple[int, float]] = {}
    for stage in {action.stage for action in actions}:
        if 0 <= stage < stages and rank_of_stage[stage] == rank:
            cost = costs[stage]
            table[stage, "F"] = FORWARD * stages + stage, cost.forward_s
            table[stage, "B"] = BACKWARD * stages + stage, cost.backward_s
            table[stage, "I"] = BACKWARD * stages + stage, cost.input_s
            table[stage, "W"] = WEIGHT * stages + stage, cost.weight_s
    nodes, durations = [], []
    for stage, kind, microbatch in actions:
        entry = table.get((stage, kind))
        if entry is None:
            raise ScheduleError(f"rank {rank}: {_fault(Action(stage, kind, microbatch), rank_of_stage)}")
        nodes.append(microbatch * points + entry[0])
        durations.append(entry[1])
    return Program(nodes, durations)


def _fault(action: Action, rank_of_stage: Sequence[int]) -> str:
    if action.kind not in COMPUTE:
        return (
            f"{action} is not one of {', '.join(COMPUTE)}; leave sends and receives out, "
            "the simulation adds its own"
        )
    if not 0 <= action.stage < len(rank_of_stage):
        return f"{action} is not among {len(rank_of_stage)} stages"
    return f"{action} is on the wrong rank, stage {action.stage} is on rank {rank_of_stage[action.stage]}"
