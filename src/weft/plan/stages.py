"""From units on segments to stages that can be simulated, and back: placements that simulation has looked at.

A stage is what a rank runs of a microbatch at a stretch. Where the segments of a placement follow the program, the
stages are the segments. A group of units that must lie together (a tied embedding and head) may come out of
order; then its late unit joins a later segment of its partition, if there is one at that place, or else
becomes a stage of its own, and the microbatch visits the partition once more:

    segments of the units     0 0 1 2 2 0
    partitions 0 1 2          stages 0 1 2 3 on the ranks 0 1 2 0        one visit more
    partitions 0 1 2 2 1 0    stages 0 1 2 3 4 5, of which 3 and 4 are empty: no visit more
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from weft.errors import PlacementError
from weft.graph.model import Graph, Unit
from weft.partition.chain.chunks import chunked
from weft.partition.chain.exact import exact
from weft.partition.cost import COPIES
from weft.partition.placement import Placement
from weft.partition.problem import LAYOUTS, Device, Problem, owners
from weft.partition.problem import in_flight as held_by
from weft.partition.refine import refine
from weft.plan.option import Option, Placed, options
from weft.plan.search import ACTIONS, Found, Place, Progress, Within, actions_of, merit, recomputed, search
from weft.plan.v_apex import best_turn, tries, turns
from weft.schedule import Schedule
from weft.schedule.table import KINDS
from weft.simulate import FREE, Edge, Links, StageCost, simulate

EFFORT = 150_000
"""How many actions are simulated at most to refine one placement."""

FINALISTS = 3
"""How many choices are refined for their own schedules."""

BASE = {(1, "looped"): "1f1b", (2, "v"): "zbv"}
"""(chunks, layout) to the schedule that a placement is refined for; "interleaved_1f1b" for others."""


def stages_of(
    graph: Graph,
    segments: Sequence[int],
    rank_of_segment: Sequence[int],
    *,
    speeds: Sequence[float] = (),
    placement: Placement | None = None,
) -> Placed:
    """The stages of a placement and their costs, for one microbatch.

    A tensor goes to a rank once: to the first stage there that uses it. What goes to the next stage counts in
    `forward_bytes`, and its gradient in the other's `backward_bytes`; what skips stages is an edge. What is kept
    between I and W is not known for single units, so all activations are taken to stay that long.

    Args:
        graph: The units.
        segments: The segment of each unit.
        rank_of_segment: The rank of each segment.
        speeds: How fast each rank is; 1 if not given.
        placement: What the result carries along.

    >>> from weft.graph import Tensor
    >>> units = [Unit(name, 1.0, 2.0, 400, 64) for name in "abc"]
    >>> graph = Graph(units, [Tensor("a", ("b", "c"), 16), Tensor("b", ("c",), 8)])
    >>> found = stages_of(graph, (0, 1, 2), (0, 1, 2))
    >>> [stage.forward_bytes for stage in found.stages], found.edges
    ([16, 8, 0], (Edge(source=0, target=2, bytes=16),))
    """
    at, ranks = _in_order(segments, rank_of_segment)
    placed = on_stages(graph, at, ranks, speeds=speeds, placement=placement)
    return placed if ranks != tuple(rank_of_segment) else replace(placed, rank_of_stage=())


def on_stages(
    graph: Graph,
    at: Sequence[int],
    ranks: Sequence[int],
    *,
    speeds: Sequence[float] = (),
    placement: Any = None,
) -> Placed:
    """The stages and their costs, as `stages_of` counts them, where no tensor goes to an earlier stage.

    Args:
        graph: The units.
        at: The stage of each unit.
        ranks: The rank of each stage.
        speeds: How fast each rank is; 1 if not given.
        placement: What the result carries along.
    """
    members: list[list[Unit]] = [[] for _ in ranks]
    for unit, stage in zip(graph, at, strict=True):
        members[stage].append(unit)
    onward = [0] * len(ranks)
    skips: dict[tuple[int, int], int] = {}
    for source, targets, size in graph.flows:
        home = at[source]
        there = {ranks[home]}
        for stage in sorted({at[target] for target in targets} - {home}):
            if stage == home + 1:
                onward[home] += size
            elif ranks[stage] not in there:
                skips[home, stage] = skips.get((home, stage), 0) + size
            there.add(ranks[stage])
    return Placed(
        tuple(
            _stage(units, speeds[rank] if speeds else 1.0, after, before)
            for units, rank, after, before in zip(members, ranks, onward, [0, *onward], strict=False)
        ),
        tuple(Edge(source, target, size) for (source, target), size in sorted(skips.items())),
        placement,
        tuple(ranks),
    )


def _stage(units: Sequence[Unit], speed: float, forward_bytes: int, backward_bytes: int) -> StageCost:
    second = 1e3 * speed
    halves = [unit.halves_ms for unit in units]
    kept = sum(unit.activation_bytes for unit in units)
    return StageCost(
        forward_s=sum(unit.forward_ms for unit in units) / second,
        backward_s=sum(unit.backward_ms for unit in units) / second,
        input_s=sum(inputs for inputs, _ in halves) / second,
        weight_s=sum(weights for _, weights in halves) / second,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        activation_bytes=kept,
        weight_bytes=kept,
        transient_bytes=max((unit.transient_bytes for unit in units), default=0),
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
    )


def _in_order(
    segments: Sequence[int], rank_of_segment: Sequence[int]
) -> tuple[Sequence[int], tuple[int, ...]]:
    """The stage of each unit, never falling, and the rank of each stage."""
    if all(one <= other for one, other in itertools.pairwise(segments)):
        return segments, tuple(rank_of_segment)
    wanted = [rank_of_segment[segment] for segment in segments]
    at: list[int] = []
    stage = 0
    for rank in wanted:
        while stage < len(rank_of_segment) and rank_of_segment[stage] != rank:
            stage += 1
        at.append(stage)
    if stage < len(rank_of_segment):
        return at, tuple(rank_of_segment)
    runs = [0, *itertools.accumulate(one != other for one, other in itertools.pairwise(wanted))]
    idle = sorted(set(rank_of_segment) - set(wanted))  # a rank without units has an empty stage at the end
    return runs, (*(rank for rank, _ in itertools.groupby(wanted)), *idle)


def stages_in(placement: Placement) -> Placed:
    """The stages of a placement, on its devices."""
    problem = placement.problem
    speeds = [device.speed for device in problem.devices]
    return stages_of(problem.graph, placement.segments, problem.owners, speeds=speeds, placement=placement)


def base_option(problem: Problem) -> Option:
    """The schedule that a placement is judged by where none is asked for: 1F1B, if a rank has one segment."""
    name = BASE.get((problem.chunks, problem.layout if problem.chunks > 1 else "looped"), "interleaved_1f1b")
    return Option(name, chunks=problem.chunks if name == "interleaved_1f1b" else None)


def simulated_s(
    placement: Placement, microbatches: int, links: Links = FREE, option: Option | None = None
) -> float:
    """The simulated step, in seconds: by the schedule of `base_option` if no other is given.

    A placement that makes microbatches come back to a rank is simulated by list scheduling.

    >>> graph = Graph(Unit(name, 1.0, 2.0, 0, 0) for name in "abcd")
    >>> round(simulated_s(exact(Problem(graph, 4)), microbatches=8), 9)
    0.033
    """
    placed, problem = stages_in(placement), placement.problem
    layout = placed.rank_of_stage or problem.owners
    option = option or base_option(problem)
    if placed.rank_of_stage and option.like is None:
        splits = option.splits or KINDS[option.schedule].splits
        option = Option("list", like=option.schedule, chunks=option.chunks, splits=splits)
    stages = recomputed(placed.stages, placed.edges) if option.recompute else placed.stages
    if option.like is None:
        made = _pattern(replace(option, recompute=False), problem.partitions, microbatches)
    else:
        made = option.actions(problem.partitions, microbatches, stages, links, None, layout)
    return simulate(made.ranks, made.rank_of_stage, stages, links, edges=placed.edges).step_s


@cache
def _pattern(option: Option, ranks: int, microbatches: int) -> Schedule:
    return option.pattern(ranks, microbatches)


def step_s(placement: Placement, microbatches: int, links: Links = FREE) -> float:
    """The step of `simulated_s`, or an estimate for more than `EFFORT` actions, in seconds.

    The estimate is what one microbatch takes alone and what the slowest partition takes for the others; it counts
    transfers in full, though some hide behind computing.
    """
    if 2 * microbatches * placement.problem.segments <= EFFORT:
        return simulated_s(placement, microbatches, links)
    alone = sum(load.time_ms for load in placement.loads)
    return (alone + (microbatches - 1) * placement.largest_ms) / 1e3


def refined(
    placement: Placement,
    microbatches: int,
    links: Links = FREE,
    option: Option | None = None,
    effort: int = EFFORT,
) -> Placement:
    """A placement whose simulated step is at most that of `placement`: `refine`, by simulation.

    Cuts are judged by steps of up to four microbatches a rank; the result is kept if the step of
    all microbatches is shorter. About `effort` actions are simulated.
    """
    few = min(microbatches, 4 * placement.problem.partitions)
    actions = 3 * few * placement.problem.segments
    if stages_in(placement).rank_of_stage or (option is not None and option.like is not None):
        actions *= 4  # list scheduling simulates several policies, on its own
    if effort < 2 * actions:
        return placement
    better = refine(placement, lambda one: simulated_s(one, few, links, option), max(1, effort // actions))
    if better.segments == placement.segments:
        return placement
    before, after = (simulated_s(one, microbatches, links, option) for one in (placement, better))
    return better if after < before else placement


@dataclass(frozen=True)
class Placer:
    """Puts the units of a graph on stages, for `search`: exactly balanced, then refined by simulation.

    Attributes:
        graph: The units.
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        links: How tensors go from rank to rank.
        memory_bytes: What each rank may take; any amount if not given.
        memory_weight: From 0 (time alone is balanced) to 1 (memory alone).
        copies: How often parameters count in the memory.
    """

    graph: Graph
    ranks: int
    microbatches: int
    links: Links = FREE
    memory_bytes: Sequence[int] | None = None
    memory_weight: float = 0.0
    copies: int = COPIES
    _known: dict[tuple[Any, ...], Placed] = field(default_factory=dict, repr=False, compare=False)

    @property
    def effort(self) -> int:
        """The most actions to simulate in order to refine a placement: fewer where all options are too many."""
        every = sum(
            actions_of(one, self.ranks, self.microbatches) for one in options(self.ranks, self.microbatches)
        )
        return EFFORT if every <= 4 * ACTIONS else EFFORT // 8

    @property
    def ahead(self) -> int | None:
        """The argument `ahead` of `search`: under a limit on memory a rank never holds more than its list does."""
        return 0 if self.memory_bytes is None else None

    def __call__(self, rank_of_stage: Sequence[int]) -> Placed:
        """The units on stages, without a limit on memory."""
        if self.ranks > 1 and tuple(rank_of_stage) == Option("list", like="v").layout(self.ranks):
            return self._place_turn(tuple(rank_of_stage))
        chunks, layout = self._layout(rank_of_stage)
        held = held_by(self.ranks, self.microbatches, chunks, layout)
        return self._place(chunks, layout, held, ())

    def within(self, option: Option) -> Placed:
        """The units on the stages of an option, so that what it keeps fits the memory of each rank.

        With recomputation one microbatch's activations count, without the inputs that are kept for more.
        """
        rank_of_stage = option.layout(self.ranks)
        chunks, layout = self._layout(rank_of_stage)
        held = (1,) * len(rank_of_stage)
        if option.like is None and not option.recompute:
            held = held_by_stage(_pattern(option, self.ranks, self.microbatches))
        devices = tuple(Device(memory_bytes=size) for size in self.memory_bytes or ())
        return self._place(chunks, layout, held, devices)

    def _layout(self, rank_of_stage: Sequence[int]) -> tuple[int, str]:
        chunks = len(rank_of_stage) // self.ranks
        for layout in LAYOUTS:
            if chunks and owners(self.ranks, chunks, layout) == tuple(rank_of_stage):
                return chunks, layout
        raise PlacementError(
            f"the stages are on the ranks {', '.join(map(str, rank_of_stage))}: units are placed on stages that are "
            f"dealt out in turn or as a V, {self.ranks} for each chunk"
        )

    def _place_turn(self, rank_of_stage: tuple[int, ...]) -> Placed:
        """The units on the stages of a V whose turn is one stage; units of a group are on one rank."""
        problem = Problem(
            self.graph, self.ranks, chunks=2, layout="v", memory_weight=self.memory_weight, copies=self.copies
        )
        costs = list(map(sum, zip(*problem.shares, strict=True)))
        found = []
        for stages in turns(costs, self.ranks, tries(self.ranks, self.microbatches)):
            segments = tuple(stage + (stage >= self.ranks) for stage in stages)
            placement = Placement(problem, segments)
            if all(
                len({placement.partitions[unit] for unit in units}) == 1
                for units in self.graph.groups.values()
            ):
                found.append(stages_of(self.graph, stages, rank_of_stage, placement=placement))
        return best_turn(found, self.ranks, self.microbatches, self.links)

    def _place(self, chunks: int, layout: str, held: tuple[int, ...], devices: tuple[Device, ...]) -> Placed:
        key = (chunks, layout, held, devices)
        if key not in self._known:
            problem = Problem(
                self.graph,
                self.ranks,
                chunks=chunks,
                layout=layout,
                devices=devices,
                memory_weight=self.memory_weight,
                in_flight=held,
                copies=self.copies,
            )
            if len(self.graph) < problem.segments:
                raise PlacementError(f"{len(self.graph)} units are not enough for {problem.segments} stages")
            start = exact(problem) if chunks == 1 else chunked(problem)
            self._known[key] = stages_in(refined(start, self.microbatches, self.links, effort=self.effort))
        return self._known[key]


def choices(
    placer: Placer, tried: Sequence[Option] | None = None, progress: Progress | None = None
) -> list[Found]:
    """The outcomes of `search` with a placer, after the best few are refined, each for its own schedule."""
    ranks, microbatches, links = placer.ranks, placer.microbatches, placer.links

    def found_with(
        place: Place, tried: Sequence[Option] | None, within: Within | None, progress: Progress | None = None
    ) -> list[Found]:
        return search(
            ranks, microbatches, place, links,
            memory_bytes=placer.memory_bytes, tried=tried, copies=placer.copies, within=within,
            ahead=placer.ahead, progress=progress,
        )  # fmt: skip

    within = placer.within if placer.memory_bytes is not None else None
    found = found_with(placer, tried, within, progress)
    for number, one in enumerate(found[:FINALISTS]):
        if one.fault or one.placed is None:
            break
        if one.option.like == "v":  # it comes from simulation
            continue
        better = refined(one.placed.placement, microbatches, links, one.option, placer.effort)
        if better is one.placed.placement:
            continue
        (again,) = found_with(always(stages_in(better)), [one.option], None)
        found[number] = min(one, again, key=merit)
    return sorted(found, key=merit)


def always(placed: Placed) -> Place:
    """Units on these stages, whichever were asked for."""
    return lambda layout: placed


def held_by_stage(made: Schedule) -> tuple[int, ...]:
    """The most microbatches that each stage keeps at once.

    >>> held_by_stage(Option("1f1b").pattern(ranks=3, microbatches=8))
    (3, 2, 1)
    """
    peaks = [0] * made.stages
    held = [0] * made.stages
    for actions in made.ranks:
        for stage, kind, _ in actions:
            if kind == "F":
                held[stage] += 1
                peaks[stage] = max(peaks[stage], held[stage])
            elif kind in ("B", "W"):
                held[stage] -= 1
    return tuple(peaks)
