"""Draws of every schedule, with what it may hold: the one battery's input."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st

from weft.schedule import CHUNKS, ListCost, Schedule, from_csv, greedy, make, to_csv
from weft.schedule.generators.interleaved_1f1b import group


class Case(NamedTuple):
    """A schedule and its promise: at most `held` (stage, microbatch) on a rank."""

    schedule: Schedule
    held: int


def holds(name: str, ranks: int, microbatches: int, chunks: int, active: int | None) -> int:
    """What the docstrings promise."""
    limit = min(microbatches, ranks if active is None else min(active, ranks))
    bounds = {
        "gpipe": microbatches,
        "1f1b": limit,
        "zb_h1": limit,
        "interleaved_1f1b": (chunks - 1) * len(group(microbatches, ranks)[0]) + 2 * (ranks - 1) + 1,
        "looped_bfs": chunks * microbatches,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
        "v_half": ranks + 1 + (ranks % 2 == 0),
        "v_min": (2 * ranks + 8) // 3,
    }
    return min(bounds[name], chunks * microbatches)


@st.composite
def numbered(draw: Any) -> Case:
    name = draw(st.sampled_from(sorted(CHUNKS)))
    ranks, microbatches = draw(st.integers(1, 7)), draw(st.integers(1, 15))
    least, most = CHUNKS[name]
    chunks = draw(st.integers(least, most or 4))
    active = draw(st.none() | st.integers(1, 9))
    schedule = make(name, ranks, microbatches, chunks=chunks, active=active)
    return Case(schedule, holds(name, ranks, microbatches, chunks, active))


TIMES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 7.0])


@st.composite
def stage_costs(draw: Any) -> list[ListCost]:
    """Stages on any ranks, ranks visited several times and unevenly; B whole, split or either, by stage."""
    ranks = draw(st.integers(1, 4))
    owners = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=4))]))
    stages = []
    for owner in owners:
        weight_s = draw(st.none() | TIMES)
        costs = draw(TIMES), draw(TIMES), weight_s, draw(st.integers(0, 5)), draw(TIMES)
        stages.append(ListCost(owner, *costs, None if weight_s is None else draw(st.none() | TIMES)))
    return stages


def whole(stages: list[ListCost]) -> list[int]:
    """The bytes of one microbatch on each rank."""
    ranks = 1 + max(stage.rank for stage in stages)
    return [sum(stage.activation_bytes for stage in stages if stage.rank == rank) for rank in range(ranks)]


@st.composite
def listed(draw: Any) -> tuple[list[ListCost], int, list[int], Schedule]:
    """Costs, microbatches, memory by rank and the schedule."""
    stages, microbatches = draw(stage_costs()), draw(st.integers(1, 9))
    memory = [size + draw(st.integers(0, 12)) for size in whole(stages)]
    return stages, microbatches, memory, greedy(stages, microbatches, memory)


@st.composite
def any_case(draw: Any) -> Case:
    """Of every kind, `list` and `file` included."""
    kind = draw(st.sampled_from(["numbered", "list", "file"]))
    if kind == "list":
        stages, microbatches, _, schedule = draw(listed())
        return Case(schedule, len(stages) * microbatches)
    case = draw(numbered())
    return Case(from_csv(to_csv(case.schedule)), case.held) if kind == "file" else case
