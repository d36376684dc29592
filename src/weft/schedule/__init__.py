"""Stages to actions: pure generators, one a file, and one checker for all of them (`legal`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.errors import ScheduleError
from weft.schedule.file import from_csv, to_csv
from weft.schedule.generators.dualpipev import dualpipev
from weft.schedule.generators.gpipe import gpipe
from weft.schedule.generators.greedy import ListCost, greedy
from weft.schedule.generators.interleaved_1f1b import interleaved_1f1b
from weft.schedule.generators.looped_bfs import looped_bfs
from weft.schedule.generators.one_f_one_b import one_f_one_b
from weft.schedule.generators.v_half import v_half
from weft.schedule.generators.v_min import v_min
from weft.schedule.generators.zb_h1 import zb_h1
from weft.schedule.generators.zbv import zbv
from weft.schedule.schedule import Action, Schedule, in_flight, loop, vee
from weft.schedule.table import CHUNKS, KINDS, NAMES, named

__all__ = [
    "CHUNKS",
    "NAMES",
    "Action",
    "Schedule",
    "ListCost",
    "dualpipev",
    "from_csv",
    "greedy",
    "in_flight",
    "one_f_one_b",
    "interleaved_1f1b",
    "looped_bfs",
    "make",
    "named",
    "rank_of_stage",
    "gpipe",
    "to_csv",
    "v_half",
    "v_min",
    "zb_h1",
    "zbv",
]


def make(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    active: int | None = None,
    chunks: int | None = None,
    costs: Sequence[ListCost] | None = None,
    memory_bytes: Sequence[int] | None = None,
    text: str | None = None,
) -> Schedule:
    """The schedule called `name`.

    Args:
        name: One of `NAMES`, or a second name of it (see `table.SECOND_NAMES`).
        ranks: How many ranks there are.
        microbatches: How many microbatches make the step.
        active: How many microbatches a rank may hold at once. `1f1b` and `zb_h1` keep to it; what
            the others hold is fixed by their pattern, or for `list` by `memory_bytes`.
        chunks: How many stages a rank has; the least that the schedule takes if not given (`CHUNKS`).
        costs: For `list`: what each stage costs, and its rank.
        memory_bytes: For `list`: what the activations on each rank may take.
        text: For `file`: the CSV text.

    Raises:
        ScheduleError: With everything that is wrong with the arguments.
        FormatError: If `text` is no schedule.

    >>> print(*make("interleaved_1f1b", ranks=2, microbatches=2, chunks=2).ranks[0])
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    """
    name = named(name)
    counts = {"ranks": ranks, "microbatches": microbatches, "active": active, "chunks": chunks}
    faults = [
        f"{what} is {number}, it must be at least 1"
        for what, number in counts.items()
        if number is not None and number < 1
    ]
    if name not in NAMES:
        faults.insert(0, f'there is no schedule "{name}", write one of {", ".join(NAMES)}')
    faults += _misplaced(name, chunks, {"costs": costs, "memory_bytes": memory_bytes, "text": text})
    if faults:
        raise ScheduleError("; ".join(faults))
    if name == "list":
        assert costs is not None
        return _as_asked(greedy(costs, microbatches, memory_bytes), ranks, microbatches)
    if name == "file":
        assert text is not None
        return _as_asked(from_csv(text), ranks, microbatches)
    generate = KINDS[name].generate
    assert generate is not None
    return generate(ranks, microbatches, active, chunks)


def rank_of_stage(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The rank of each stage of a schedule, as `make` has it, without its actions.

    Raises:
        ScheduleError: The schedule takes another number of chunks, or follows from more than these numbers.

    >>> rank_of_stage("zbv", 3), rank_of_stage("interleaved_1f1b", 2, chunks=3)
    ((0, 1, 2, 2, 1, 0), (0, 1, 0, 1, 0, 1))
    """
    faults = _misplaced(name, chunks, {"costs": None, "memory_bytes": None, "text": None})
    if faults:
        raise ScheduleError("; ".join(faults))
    return vee(ranks) if KINDS[name].v else loop(ranks, chunks or CHUNKS[name][0])


def _misplaced(name: str, chunks: int | None, given: Mapping[str, object]) -> list[str]:
    """Faults of arguments that the schedule does not take, or needs."""
    faults = []
    for what, owner in (("costs", "list"), ("memory_bytes", "list"), ("text", "file")):
        if given[what] is not None and name != owner:
            faults.append(f'{what} is for "{owner}" only')
        if given[what] is None and name == owner and what != "memory_bytes":
            faults.append(f'"{owner}" needs {what}')
    if name in CHUNKS and chunks is not None and chunks >= 1:
        least, most = CHUNKS[name]
        if chunks < least or (most is not None and chunks > most):
            takes = f"{least} chunks a rank or more" if most is None else f"{most} for each rank"
            faults.append(f'chunks is {chunks}, "{name}" takes {takes}')
    elif name in NAMES and chunks is not None and chunks >= 1:
        faults.append(f'chunks is {chunks}, but "{name}" has the stages of its input')
    return faults


def _as_asked(schedule: Schedule, ranks: int, microbatches: int) -> Schedule:
    """The schedule of an input that has its own numbers, which must be those that were asked for."""
    if (len(schedule.ranks), schedule.microbatches) != (ranks, microbatches):
        found = f"{len(schedule.ranks)} ranks and {schedule.microbatches} microbatches"
        raise ScheduleError(f"the {schedule.name} is for {found}, but there are {ranks} and {microbatches}")
    return schedule
