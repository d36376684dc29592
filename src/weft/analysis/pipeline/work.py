"""The work of ranks and stages in one step, from the pieces of replayed steps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.analysis.measured import copies_of
from weft.analysis.replay import INSIDE, Node, Replay
from weft.simulate import StageCost
from weft.timeline import WORK

Factor = Callable[[Node], float]

UNEXPECTED = 1.2
"""A rank is slower than its units say where it is so many times slower than the others: less may be the measure's."""


def step_work(replay: Replay) -> dict[int, dict[int, float]]:
    """For each rank and step the seconds of F, B, I and W."""
    found: dict[int, dict[int, float]] = {rank: defaultdict(float) for rank in replay.begins_s}
    for node in replay.nodes:
        own = found[node.rank]
        own[node.step] += node.end_s - node.start_s if node.kind in WORK else 0.0
    return found


def by_partition(factors: Mapping[int, float], partitions: Mapping[int, int]) -> Factor:
    """The factor of a piece of work is that of its partition; other pieces stay as they are."""
    return lambda node: factors[partitions[node.rank]] if node.kind in WORK else 1.0


def at_peers_speed(
    replay: Replay, partitions: Mapping[int, int], expected: Mapping[int, float]
) -> dict[tuple[int, int], float]:
    """For each rank and step by which factor its work would be shorter at its peers' speed; 1 where it is not slow.

    Peers are the other copies of its partition. Without copies a rank has its own median over the steps, and is
    compared with the others by what its units should take.

    Args:
        replay: The steps.
        partitions: For each rank its partition.
        expected: For each partition what its units should take; empty if that is not known.
    """
    work, copies = step_work(replay), copies_of(partitions)
    usual = {rank: statistics.median(own.values()) for rank, own in work.items() if own}
    found = {}
    for rank, own in work.items():
        peers = [usual[other] for other in copies[rank]]
        wanted = (
            statistics.median(peers)
            if peers
            else min(usual[rank], _expected(rank, usual, partitions, expected))
        )
        for step, took_s in own.items():
            found[rank, step] = min(1.0, wanted / took_s) if took_s else 1.0
    return found


def _expected(
    rank: int, usual: Mapping[int, float], partitions: Mapping[int, int], expected: Mapping[int, float]
) -> float:
    """A rank's expected work in seconds, if its units exceed their expectation by as much as those of the others."""
    times = {other: usual[other] / expected.get(partitions[other], 0.0) for other in usual
             if expected.get(partitions[other], 0.0) > 0.0}  # fmt: skip
    others = [each for other, each in times.items() if other != rank]
    if rank not in times or not others or times[rank] <= UNEXPECTED * statistics.median(others):
        return usual[rank]
    return statistics.median(others) * expected[partitions[rank]]


@dataclass(frozen=True)
class Stages:
    """A pipeline as the simulation takes it.

    Attributes:
        rank_of_stage: The partition of each stage.
        microbatches: Of a step.
        times: For each stage and kind the seconds of one microbatch.
        overhead_s: For each partition what Python takes between two actions.
        inside_s: What a forward and a backward pass of any stage take beyond what their units do.
        inner: The pieces that are part of it: work, and Python between.
    """

    rank_of_stage: tuple[int, ...]
    microbatches: int
    times: Mapping[tuple[int, str], float]
    overhead_s: Mapping[int, float]
    inner: frozenset[Node]
    inside_s: tuple[float, float] = (0.0, 0.0)

    def costs(self, microbatches: int) -> list[StageCost]:
        """The cost of each stage with so many microbatches: units by their size, Python as it is."""
        share = self.microbatches / microbatches
        ahead_s, back_s = self.inside_s
        same_s = {"F": ahead_s, "B": back_s, "I": back_s / 2, "W": back_s / 2}
        found = []
        for stage, rank in enumerate(self.rank_of_stage):
            forward, backward, inputs, weights = (
                _resized(self.times.get((stage, kind), 0.0), share, same_s[kind]) for kind in "FBIW"
            )
            if not backward:
                backward = inputs + weights
            elif not inputs + weights:
                inputs = weights = backward / 2
            more = self.overhead_s[rank]
            found.append(StageCost(forward + more, backward + more, inputs + more, weights + more))
        return found


def _resized(took_s: float, share: float, same_s: float) -> float:
    """The seconds of a pass whose units do ``share`` times the work, while ``same_s`` of it stays."""
    same_s = min(took_s, same_s)
    return share * (took_s - same_s) + same_s


def stages_of(
    replay: Replay, partitions: Mapping[int, int], unit_costs: Mapping[int, tuple[float, float]]
) -> Stages | None:
    """The stages; nothing where they are not known, or one lies on several partitions.

    Args:
        replay: The steps.
        partitions: For each rank its partition.
        unit_costs: For each partition what its units were measured to take for one microbatch, forward and backward;
            empty if that is not known.
    """
    times: dict[tuple[int, str], float] = defaultdict(float)
    actions: dict[tuple[int, str], set[tuple[int, int, int]]] = defaultdict(set)
    homes: dict[int, set[int]] = defaultdict(set)
    for node in replay.nodes:
        if node.kind in WORK:
            times[node.stage, node.kind] += node.end_s - node.start_s
            actions[node.stage, node.kind].add((node.rank, node.step, node.microbatch))
            homes[node.stage].add(partitions[node.rank])
    number = len(homes)
    if sorted(homes) != list(range(number)) or any(len(home) > 1 for home in homes.values()):
        return None
    rank_of_stage = tuple(next(iter(homes[stage])) for stage in range(number))
    if sorted(set(rank_of_stage)) != sorted(set(partitions.values())) or not number:
        return None
    overhead_s, inner = _between_actions(replay, partitions)
    microbatches = len({microbatch for each in actions.values() for _, _, microbatch in each})
    means = {what: seconds / len(actions[what]) for what, seconds in times.items()}
    return Stages(
        rank_of_stage,
        microbatches,
        means,
        overhead_s,
        inner,
        _inside_passes(rank_of_stage, means, unit_costs),
    )


def _inside_passes(
    rank_of_stage: Sequence[int],
    times: Mapping[tuple[int, str], float],
    costs: Mapping[int, tuple[float, float]],
) -> tuple[float, float]:
    """The seconds of a pass beyond those of its units, forward and backward: Python, the way to a kernel.

    Each microbatch costs that on every partition. So the least of all counts: others are slow for reasons of their own.
    """
    if set(costs) != set(rank_of_stage):
        return 0.0, 0.0
    least = []
    for at, kinds in enumerate(("F", "BIW")):
        took_s = dict.fromkeys(costs, 0.0)
        for stage, partition in enumerate(rank_of_stage):
            took_s[partition] += sum(times.get((stage, kind), 0.0) for kind in kinds)
        least.append(min((took_s[each] - costs[each][at]) / rank_of_stage.count(each) for each in costs))
    return max(0.0, least[0]), max(0.0, least[1])


def _between_actions(
    replay: Replay, partitions: Mapping[int, int]
) -> tuple[dict[int, float], frozenset[Node]]:
    """For each partition Python's time between two actions, and the pieces from the first to the last action."""
    steps: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in replay.nodes:
        steps[node.rank, node.step].append(node)
    seconds: dict[int, float] = defaultdict(float)
    actions: dict[int, int] = defaultdict(int)
    inner: list[Node] = []
    for (rank, _), nodes in steps.items():
        works = [at for at, node in enumerate(nodes) if node.kind in WORK]
        if not works:
            continue
        own = [node for node in nodes[works[0] : works[-1] + 1] if node.kind in (*WORK, INSIDE)]
        inner += own
        seconds[partitions[rank]] += sum(node.end_s - node.start_s for node in own if node.kind == INSIDE)
        actions[partitions[rank]] += len(
            {(node.kind, node.stage, node.microbatch) for node in own if node.kind in WORK}
        )
    return {
        partition: seconds[partition] / actions[partition] if actions[partition] else 0.0
        for partition in set(partitions.values())
    }, frozenset(inner)
