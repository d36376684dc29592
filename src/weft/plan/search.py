"""The split and the schedule that take the least time: the choice `auto`.

Every option is a schedule with its numbers. For each the units are placed on its stages, the step is
simulated, and what does not fit the memory falls out:

    option  ->  rank of each stage  ->  placement, cost of each stage  ->  actions  ->  step time, peak memory

What is minimised is the step, not the largest stage. The units are placed once for each layout of stages,
for the least time. Where an option does not fit the memory that way, they are placed for it alone, if the caller
knows how (`within`).

A search over 64 ranks and 256 microbatches would simulate ten million actions, for minutes. Up to `ACTIONS` everything
is tried. Beyond that options are taken in this order for as long as their actions add up to no more:

    1  schedules with a pattern, as they are       2  list scheduling
    3  the same with activations computed anew or fewer active microbatches: they only save memory

With a limit on memory 3 comes before 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from weft.errors import PlacementError, ScheduleError
from weft.plan.option import Option, Placed, options
from weft.schedule import Schedule
from weft.schedule.generators.greedy import LEADERS, POLICIES, TRIED
from weft.simulate import Edge, Links, Simulation, StageCost, as_weft_runs
from weft.units import format_bytes

ACTIONS = 500_000
"""Actions that a search simulates at most; about 60 microseconds each."""
FIRST = ("1f1b", "zb_h1", "zbv", "interleaved_1f1b", "v_half", "gpipe")
"""Schedules in the order in which they are taken."""
TOO_MANY = "not tried: too much to simulate at this size"


def actions_of(option: Option, ranks: int, microbatches: int) -> int:
    """About how many actions are simulated for an option; none if it cannot be for so many ranks.

    >>> actions_of(Option("1f1b"), 4, 8), actions_of(Option("interleaved_1f1b", chunks=2), 4, 8)
    (64, 128)
    """
    try:
        visits = len(option.layout(ranks)) * microbatches
    except ScheduleError:
        return 0
    if option.like is None:
        return visits * (3 if option.schedule.startswith(("zb", "v_")) else 2)
    few = min(1.0, max(TRIED, 2 * ranks) / microbatches)
    policies = len(POLICIES) + (6 * LEADERS if option.splits else 0)
    return round(visits * 3 * (1 + policies * few))


def affordable(
    options: Sequence[Option], ranks: int, microbatches: int, limited: bool, most: int = ACTIONS
) -> list[Option]:
    """The options that are tried, in the order in which they were given.

    Args:
        options: All that could be.
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        limited: Whether ranks have a limit on memory.
        most: How many actions may be simulated. The first option is tried in any case.
    """
    if len(options) == 1:
        return list(options)
    costs = [actions_of(option, ranks, microbatches) for option in options]
    if sum(costs) <= most:
        return list(options)

    def worth(at: int) -> tuple[int, int, int]:
        option = options[at]
        saves = option.recompute or option.active is not None
        listed = option.like is not None
        known = FIRST.index(option.schedule) if option.schedule in FIRST else len(FIRST)
        return (2 * listed + saves if limited else listed + 2 * saves), known, costs[at]

    taken: set[int] = set()
    spent = 0
    for at in sorted(range(len(options)), key=worth):
        if not taken or spent + costs[at] <= most:
            taken.add(at)
            spent += costs[at]
    return [option for at, option in enumerate(options) if at in taken]


STOPPED = "not tried: the search was stopped"
VISIT = 0.02
"""What each stage more on a rank must gain of the step: visits of stages cost more than a trace sees (measured; see
`docs/design/schedules.md`)."""


@dataclass(frozen=True)
class Found:
    """The outcome of an option. `fault` says why it fell out; then the numbers, and the step, may be missing."""

    option: Option
    placed: Placed | None = None
    schedule: Schedule | None = None
    step_s: float = 0.0
    bubble: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    fault: str = ""
    step: Simulation | None = field(default=None, repr=False, compare=False)


Place = Callable[[Sequence[int]], Placed]
"""From the rank of each stage to the units on the stages; raises `PlacementError` where that cannot be."""

Progress = Callable[[int, int, float | None], None]
"""Called with how many options have been tried, of how many, and the best step so far in seconds."""

Within = Callable[[Option], Placed]
"""The units on the stages of an option, so that it fits the memory; raises `PlacementError` where it cannot."""


def search(
    ranks: int,
    microbatches: int,
    place: Place,
    links: Links,
    *,
    memory_bytes: Sequence[int] | None = None,
    tried: Sequence[Option] | None = None,
    copies: int = 4,
    within: Within | None = None,
    ahead: int | None = 0,
    offloads: bool = False,
    held: int = 0,
    progress: Progress | None = None,
) -> list[Found]:
    """Every option, the best first (see `merit`), those that fell out last.

    Steps that agree in nine digits count as equal; then the one that needs least memory is best.

    Args:
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        place: Puts the units on stages.
        links: How tensors go from rank to rank.
        memory_bytes: What each rank may take; any amount if not given.
        tried: The options; all that `options` names if not given.
        copies: How often parameters count in the memory.
        within: Puts the units on the stages of an option that does not fit the memory otherwise.
        ahead: How many more microbatches than its list a rank may hold, started while it would wait; None: never
            more than at that point of the list.
        offloads: Whether activations of microbatches that wait are outside of the device.
        held: How many microbatches ranks hold where these come back to them.
        progress: Called before each option with how many have been tried, of how many, and the best step so far.

    What is left out since it would take too long (see `weft.plan.search`), or since somebody has pressed Ctrl-C after a
    first one was found, is among those that fell out.

    Raises:
        ScheduleError: If `memory_bytes` is not one number a rank.
        PlacementError: If `place` gives another number of stages than it was asked for.
    """
    if memory_bytes is not None and len(memory_bytes) != ranks:
        raise ScheduleError(f"memory_bytes has {len(memory_bytes)} numbers, but there are {ranks} ranks")
    placed: dict[tuple[int, ...], Placed | str] = {}
    evaluate = _Evaluation(ranks, microbatches, links, memory_bytes, copies, ahead, offloads, held)
    every = list(options(ranks, microbatches) if tried is None else tried)
    chosen = affordable(every, ranks, microbatches, memory_bytes is not None)

    def result(option: Option) -> Found:
        try:
            layout = option.layout(ranks)
        except ScheduleError as error:
            return Found(option, fault=_line(error))
        if layout not in placed:
            placed[layout] = _try_to_place(place, layout)
        one = evaluate.choice(option, layout, placed[layout])
        if one.fault and one.placed is not None and memory_bytes is not None and within is not None:
            other = evaluate.choice(option, layout, _try_to_place(within, option))
            one = one if other.placed is None else other
        return one

    found: list[Found] = []
    left = [Found(option, fault=TOO_MANY) for option in every if option not in chosen]
    try:
        for option in chosen:
            if progress is not None:
                progress(
                    len(found), len(chosen), min((one.step_s for one in found if not one.fault), default=None)
                )
            found.append(result(option))
    except KeyboardInterrupt:
        if all(one.fault for one in found):
            raise
        left += [Found(option, fault=STOPPED) for option in chosen[len(found) :]]
    return sorted([*found, *left], key=merit)


def merit(found: Found) -> tuple[bool, float, int, bool]:
    """The key by which choices are compared: the smaller the better."""
    made = found.schedule
    more = len(made.rank_of_stage) / len(made.ranks) - 1 if made is not None else 0.0
    step_s = float(f"{found.step_s * (1 + VISIT * more):.9g}")
    return bool(found.fault), step_s, sum(found.peak_bytes), found.option.recompute


T = TypeVar("T")


def _try_to_place(place: Callable[[T], Placed], where: T) -> Placed | str:
    """Units on stages, or why that cannot be."""
    try:
        return place(where)
    except PlacementError as error:
        return _line(error)


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class _Evaluation:
    """The measures of all options."""

    ranks: int
    microbatches: int
    links: Links
    memory_bytes: Sequence[int] | None
    copies: int
    ahead: int | None
    offloads: bool
    held: int

    def choice(self, option: Option, layout: tuple[int, ...], placed: Placed | str) -> Found:
        """The outcome of an option whose units are placed so."""
        if isinstance(placed, str):
            return Found(option, fault=placed)
        asked, layout = layout, placed.rank_of_stage or layout
        if len(placed.stages) != len(layout):
            raise PlacementError(
                f"the placement has {len(placed.stages)} stages, but {option} on {self.ranks} ranks has {len(layout)}"
            )
        if layout != asked and option.like is None:
            return Found(option, placed, fault=f"{_comes_back(layout, asked)}: only list takes such stages")
        stages = recomputed(placed.stages, placed.edges) if option.recompute else placed.stages
        fault = self._fault(self._least(option, layout, stages)) if option.like is not None else ""
        if fault:
            return Found(option, placed, fault=fault)
        try:
            made = option.actions(
                self.ranks, self.microbatches, stages, self.links, self._left(layout, stages), layout
            )
        except ScheduleError as error:
            return Found(option, placed, fault=_line(error))
        splits = any(action.kind == "W" for actions in made.ranks for action in actions)
        if splits and any(one.backward_s and not one.input_s + one.weight_s for one in placed.stages):
            return Found(option, placed, fault="what I and W take by themselves is not known")
        held = self.held if placed.revisits else 0
        step = as_weft_runs(
            made, stages, self.links, placed.edges, self.copies, self.ahead, self.offloads, held
        )
        return Found(
            option,
            placed,
            made,
            step.step_s,
            step.bubble,
            step.peak_bytes,
            self._fault(step.peak_bytes),
            step,
        )

    def _fault(self, peak_bytes: Sequence[int]) -> str:
        """The text about a rank that has too little memory; empty if none has."""
        for rank, (needed, limit) in enumerate(zip(peak_bytes, self.memory_bytes or (), strict=False)):
            if needed > limit:
                return f"rank {rank} needs {format_bytes(needed)}, it has {format_bytes(limit)}"
        return ""

    def _least(self, option: Option, layout: Sequence[int], stages: Sequence[StageCost]) -> list[int]:
        """The bytes of each rank for "list" to run a single microbatch."""
        needed = self._beside(layout, stages)
        for rank, stage in zip(layout, stages, strict=True):
            needed[rank] += max(stage.activation_bytes, stage.weight_bytes * option.splits)
        return needed

    def _left(self, layout: Sequence[int], stages: Sequence[StageCost]) -> list[int] | None:
        """The bytes that parameters, and what is computed anew, leave for activations."""
        if self.memory_bytes is None or self.offloads:
            return None
        taken = self._beside(layout, stages)
        return [max(0, size - own) for size, own in zip(self.memory_bytes, taken, strict=True)]

    def _beside(self, layout: Sequence[int], stages: Sequence[StageCost]) -> list[int]:
        """The bytes of each rank beside activations that are kept."""
        parameters, transient = [0] * self.ranks, [0] * self.ranks
        for rank, stage in zip(layout, stages, strict=True):
            parameters[rank] += self.copies * stage.parameter_bytes
            transient[rank] = max(transient[rank], stage.transient_bytes)
        return [own + extra for own, extra in zip(parameters, transient, strict=True)]


def _comes_back(layout: Sequence[int], asked: Sequence[int]) -> str:
    """The text about the rank that microbatches come back to, where that was not asked for."""
    pairs = itertools.zip_longest(layout, asked)
    at, rank = next((stage, rank) for stage, (rank, wanted) in enumerate(pairs) if rank != wanted)
    return f"units that must lie together bring microbatches back to rank {rank} after stage {at - 1}"


def simulation(found: Found, links: Links, copies: int = 4, ahead: int | None = 0) -> Simulation:
    """The step of a choice, as `search` simulated it; it must have a schedule."""
    assert found.placed is not None and found.schedule is not None
    placed = found.placed
    stages = recomputed(placed.stages, placed.edges) if found.option.recompute else placed.stages
    return as_weft_runs(found.schedule, stages, links, placed.edges, copies, ahead)


def recomputed(stages: Sequence[StageCost], edges: Sequence[Edge] = ()) -> tuple[StageCost, ...]:
    """The stages if each keeps only its inputs and computes its forward pass anew before its backward pass.

    The inputs of the first stage are the mini-batch, which is there anyhow. While B or I runs, all
    activations of the stage are there, for one microbatch.

    >>> recomputed([StageCost(1.0, 2.0, activation_bytes=90)])[0].backward_s
    3.0
    """
    inputs = [0, *(stage.forward_bytes for stage in stages[:-1])]
    for _, target, size in edges:
        inputs[target] += size
    return tuple(
        replace(
            stage,
            backward_s=stage.backward_s + stage.forward_s,
            input_s=stage.input_s + stage.forward_s,
            activation_bytes=min(stage.activation_bytes, size),
            transient_bytes=max(stage.activation_bytes - size, stage.transient_bytes),
        )
        for stage, size in zip(stages, inputs, strict=True)
    )
