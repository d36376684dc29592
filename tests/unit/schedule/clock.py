"""An independent clock for the tests: each rank runs its list, each action as soon as it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft.schedule import Schedule
from weft.schedule.schedule import Action

Cost = Callable[[Action], float]


class Times(NamedTuple):
    """When each action ends, and per rank the idle time between its first start and its last end."""

    ends: dict[Action, float]
    step: float
    own_bubble: list[float]


def by_kind(costs: Mapping[str, float]) -> Cost:
    return lambda action: costs[action.kind]


def run(schedule: Schedule, cost: Cost, transfer: Callable[[int], float] = lambda stage: 0.0) -> Times:
    """`transfer(s)` is the time between the stages s and s + 1, both ways, if they are on two ranks."""
    ends: dict[Action, float] = {}
    rows = [list(actions) for actions in schedule.ranks]
    free, first, worked = ([0.0] * len(rows) for _ in range(3))
    while any(rows):
        before = sum(map(len, rows))
        for rank, row in enumerate(rows):
            while row and (came := arrival(schedule, row[0], ends, transfer)) is not None:
                start = max(free[rank], came)
                free[rank] = ends[row[0]] = start + cost(row[0])
                first[rank] = start if not worked[rank] else first[rank]
                worked[rank] += cost(row.pop(0))
        assert sum(map(len, rows)) < before, "stuck"
    bubbles = [free[rank] - first[rank] - worked[rank] for rank in range(len(rows))]
    return Times(ends, max(free), bubbles)


def arrival(
    schedule: Schedule, action: Action, ends: Mapping[Action, float], transfer: Callable[[int], float]
) -> float | None:
    """When all is there that the action needs; None if that is not known yet."""
    stage, kind, i = action
    needed: list[tuple[tuple[Action, ...], int]] = []
    if kind == "F" and stage > 0:
        needed.append(((Action(stage - 1, "F", i),), stage - 1))
    if kind in "BI":
        needed.append(((Action(stage, "F", i),), stage))
        if stage + 1 < schedule.stages:
            needed.append(((Action(stage + 1, "B", i), Action(stage + 1, "I", i)), stage))
    if kind == "W":
        needed.append(((Action(stage, "I", i),), stage))
    latest = 0.0
    for choices, edge in needed:
        end = next((ends[choice] for choice in choices if choice in ends), None)
        if end is None:
            return None
        owners = schedule.rank_of_stage
        crossed = owners[choices[0].stage] != owners[stage]
        latest = max(latest, end + (transfer(edge) if crossed else 0.0))
    return latest


def draw(schedule: Schedule) -> str:
    """A character for each slot (F, I and W take one, B two): digit F, letter B or I, capital W."""
    unit = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    times = run(schedule, by_kind(unit))
    rows = []
    for actions in schedule.ranks:
        row = [" "] * round(times.step)
        for action in actions:
            end, length = round(times.ends[action]), round(unit[action.kind])
            first = {"F": "0", "B": "a", "I": "a", "W": "A"}[action.kind]
            row[end - length : end] = chr(ord(first) + action.microbatch) * length
        rows.append("".join(row).rstrip())
    return "\n".join(rows)
