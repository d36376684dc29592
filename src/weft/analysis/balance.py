"""Units to move so that the partitions, as they were measured, have equal work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft import graph
from weft.analysis.measured import Measured, units_of
from weft.analysis.pipeline.simulated import Simulated, saved_by_work
from weft.analysis.run import Unit
from weft.errors import FormatError, PlacementError
from weft.partition import Problem, place


@dataclass(frozen=True)
class Move:
    """A unit that goes to another partition."""

    unit: str
    source: int
    target: int

    @property
    def line(self) -> str:
        """The line to write for PyTorch, with `"auto_partition": False`; ``model`` is the script's own."""
        return f'weft.set_partition(model.get_submodule("{self.unit}"), {self.target})'


@dataclass(frozen=True)
class Suggestion:
    """A split in program order whose largest partition is the smallest possible one.

    Attributes:
        partitions: For each unit its partition.
        moves: The units that lie elsewhere now, in program order.
        marks: What has to be written: the moves where the script places modules by hand, else every unit, since weft
            splits by itself or not at all.
        before_s: For each partition its work of a step, in seconds, as it was measured.
        after_s: The same after the moves.
        step_s: What a step would take then.
        gain: The share of a step that this saves; nothing where the replay is not faithful enough to say.
        text: The same in words.
    """

    partitions: Mapping[str, int]
    moves: tuple[Move, ...]
    marks: tuple[Move, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    step_s: float
    gain: float | None
    text: str

    @property
    def lines(self) -> tuple[str, ...]:
        """All that has to be written for it."""
        return ('"auto_partition": False', *(mark.line for mark in self.marks))


def measured_units(units: Sequence[Unit], work_s: Mapping[int, float]) -> list[float]:
    """For each unit its seconds of a step: its partition's work, shared as the units' own costs are.

    >>> measured_units([Unit("a", 0, 1.0), Unit("b", 0, 3.0), Unit("c", 1, 1.0)], {0: 8.0, 1: 2.0})
    [2.0, 6.0, 2.0]
    """
    own = [unit.forward_s + unit.backward_s for unit in units]
    found = []
    for unit, cost in zip(units, own, strict=True):
        beside = [own[at] for at, other in enumerate(units) if other.partition == unit.partition]
        total = sum(beside)
        share = cost / total if total > 0.0 else 1.0 / len(beside)
        found.append(share * work_s.get(unit.partition, 0.0))
    return found


def suggest(analysis: Measured, present: Simulated | None) -> Suggestion | None:
    """The best split of the recorded units, which may be the present one; nothing if units or steps are not known.

    Args:
        analysis: What was recorded.
        present: The same as it can be simulated, if it can.
    """
    units = units_of(analysis.run)
    replay, partitions = analysis.replay, analysis.partitions
    work_s = analysis.partition_work
    number = len(work_s)
    if (
        number < 2
        or not units
        or not replay.step_s
        or {unit.partition for unit in units} != set(range(number))
    ):
        return None
    costs = measured_units(units, work_s)
    places = _places(units, costs, number)
    if places is None:
        return None
    after = [0.0] * number
    for place_, cost in zip(places, costs, strict=True):
        after[place_] += cost
    factors = {each: after[each] / work_s[each] if work_s[each] else 1.0 for each in range(number)}
    saved = saved_by_work(replay, partitions, factors, present)
    every = tuple(Move(unit.name, unit.partition, there) for unit, there in zip(units, places, strict=True))
    moves = tuple(move for move in every if move.source != move.target)
    by_hand = analysis.setting("auto_partition", True) is False
    return Suggestion(
        {move.unit: move.target for move in every}, moves, moves if by_hand or not moves else every,
        tuple(work_s[each] for each in range(number)), tuple(after), analysis.step_s * (1.0 - saved),
        saved if replay.faithful else None, _text(moves),
    )  # fmt: skip


def _places(units: Sequence[Unit], costs: Sequence[float], partitions: int) -> tuple[int, ...] | None:
    """The partition of each unit; the present ones where no split is better, nothing where there is none."""
    try:
        whole = graph.Graph(
            graph.Unit(unit.name, 1e3 * cost, 0.0, unit.parameter_bytes, 0)
            for unit, cost in zip(units, costs, strict=True)
        )
        found = place(Problem(whole, partitions))
    except (FormatError, PlacementError):
        return None
    now = [0.0] * partitions
    for unit, cost in zip(units, costs, strict=True):
        now[unit.partition] += cost
    if found.largest_ms >= 1e3 * max(now) * (1.0 - 1e-9):
        return tuple(unit.partition for unit in units)
    return found.partitions


def _text(moves: Sequence[Move]) -> str:
    """Runs of units that move the same way, in words."""
    if not moves:
        return "no split of these units is better balanced"
    runs: list[list[Move]] = []
    for move in moves:
        if runs and (runs[-1][-1].source, runs[-1][-1].target) == (move.source, move.target):
            runs[-1].append(move)
        else:
            runs.append([move])
    return "; ".join(
        f"{run[0].unit}{' to ' + run[-1].unit if len(run) > 1 else ''} "
        f"from partition {run[0].source} to {run[0].target}"
        for run in runs
    )
