"""The conditions of a legal schedule, as one table, and the one checker that reads it.

action   needs, of the same microbatch             where
F(s)     F(s - 1)                                  s > 0
B(s)     F(s), and B(s + 1) or I(s + 1)            the latter unless s is the last stage
I(s)     F(s), and B(s + 1) or I(s + 1)            the latter unless s is the last stage
W(s)     I(s)

every F(s, i) runs once, on the rank of s; every backward once, as B or as I and W
no rank waits for ever
no rank holds more than it may: an activation is held from F(s, i) to B(s, i) or W(s, i)

A stage may be on any rank. Three ways in which tensors may travel:

buffered     a send never blocks, as in weft's transport: always checked
blocking     a send waits for its receive: ends too, if the receives stand as in `transfers`
rendezvous   between two actions a rank posts the sends of the one and the receives of the next together, and
             goes on when its peers have posted theirs (`batch_isend_irecv`): checked if asked for. Only `gpipe`,
             `1f1b`, `zb_h1` and `v_min` pass whatever the numbers; in the others some tensors are
             made long before they are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from weft.errors import ScheduleError
from weft.schedule.schedule import COMPUTE, Action, Schedule

NEEDS: dict[str, tuple[tuple[str, int], ...]] = {
    "F": (("F", -1),),
    "B": (("F", 0), ("B", +1)),
    "I": (("F", 0), ("B", +1)),
    "W": (("I", 0),),
}
"""Kind to (kind, distance in stages) of what must have run. Above, a B may be an I and a W instead."""


SHOWN = 40
"""How many actions of a rank an error shows."""


class _Place(NamedTuple):
    """The action number `slot` of `rank`."""

    rank: int
    slot: int


_Exchanges = list[list[list[_Place]]]
"""By rank and slot, the places that an action exchanges tensors with."""


def check(
    schedule: Schedule,
    *,
    max_in_flight: int | None = None,
    activation_bytes: Sequence[int] = (),
    memory_bytes: Sequence[int] = (),
    rendezvous: bool = False,
) -> None:
    """Raise a ScheduleError, with the fault marked, unless the schedule is legal.

    Args:
        schedule: What to check.
        max_in_flight: How many (stage, microbatch) a rank may hold at once; any number if not given.
        activation_bytes: What a microbatch's activations take, by stage; for `memory_bytes`.
        memory_bytes: What the activations on a rank may take together, by rank; no limit if not given.
        rendezvous: Whether it must end if receives are posted just before use and sends wait for them.

    >>> rows = [["0F0", "0B0"], ["1B0", "1F0"]]
    >>> ranks = tuple(tuple(Action.parse(text) for text in row) for row in rows)
    >>> check(Schedule("mine", ranks, rank_of_stage=(0, 1)))
    Traceback (most recent call last):
    weft.errors.ScheduleError: rank 1: 1B0 needs 1F0, which has not run by then
      rank 0:  0F0  0B0
      rank 1: >1B0< 1F0
    """
    _check_sizes(schedule, activation_bytes, memory_bytes)
    places = _places(schedule)
    _check_complete(schedule, places)
    waits = _waits(schedule, places)
    _check_ends(schedule, waits)
    if rendezvous:
        _check_ends(schedule, waits, _readers(waits))
    for rank in range(len(schedule.ranks)):
        if max_in_flight is not None:
            _check_held(schedule, rank, [1] * schedule.stages, max_in_flight, "activations in flight")
        if memory_bytes:
            _check_held(schedule, rank, activation_bytes, memory_bytes[rank], "bytes of activations")


def show(schedule: Schedule, marked: Sequence[tuple[int, int]] = (), width: int = SHOWN) -> str:
    """The schedule, a rank a line; `marked` are (rank, index) of actions to point at.

    Of lines with more than `width` actions only what stands around the marks is shown.
    """
    lines = []
    for rank, actions in enumerate(schedule.ranks):
        middle = next((index for where, index in marked if where == rank), marked[0][1] if marked else 0)
        start = max(0, min(middle - width // 2, len(actions) - width))
        cells = (
            f">{action}<" if (rank, index) in marked else f" {action} "
            for index, action in enumerate(actions[start : start + width], start)
        )
        before, after = " ..." * (start > 0), " ..." * (start + width < len(actions))
        lines.append(f"  rank {rank}:{before} {''.join(cells)}".rstrip() + after)
    return "\n".join(lines)


def _fail(text: str, schedule: Schedule, *marked: tuple[int, int]) -> NoReturn:
    raise ScheduleError(f"{text}\n{show(schedule, marked)}")


def _check_sizes(schedule: Schedule, activation_bytes: Sequence[int], memory_bytes: Sequence[int]) -> None:
    ranks, stages = len(schedule.ranks), schedule.stages
    faults = [
        f"stage {stage} is on rank {rank}, but there are {ranks} ranks"
        for stage, rank in enumerate(schedule.rank_of_stage)
        if not 0 <= rank < ranks
    ]
    if memory_bytes and len(memory_bytes) != ranks:
        faults.append(f"memory_bytes has {len(memory_bytes)} numbers, but there are {ranks} ranks")
    if memory_bytes and len(activation_bytes) != stages:
        faults.append(f"activation_bytes has {len(activation_bytes)} numbers, but there are {stages} stages")
    if faults:
        raise ScheduleError("; ".join(faults))


def _places(schedule: Schedule) -> dict[Action, _Place]:
    """Where each action stands; each must exist, be on its rank and be there once."""
    places: dict[Action, _Place] = {}
    stages, owners = schedule.stages, schedule.rank_of_stage
    for rank, actions in enumerate(schedule.ranks):
        for index, action in enumerate(actions):
            here = _Place(rank, index)
            if action.kind not in COMPUTE:
                _fail(f"rank {rank}: {action} is not one of {', '.join(COMPUTE)}", schedule, here)
            if not (0 <= action.stage < stages and action.microbatch >= 0):
                what = f"{stages} stages and the microbatches from 0"
                _fail(f"rank {rank}: {action} is not among {what}", schedule, here)
            if owners[action.stage] != rank:
                what = f"stage {action.stage} is on rank {owners[action.stage]}"
                _fail(f"rank {rank}: {action} is on the wrong rank, {what}", schedule, here)
            if action in places:
                _fail(f"rank {rank}: {action} is there twice", schedule, places[action], here)
            places[action] = here
    return places


def _check_complete(schedule: Schedule, places: dict[Action, _Place]) -> None:
    for stage, rank in enumerate(schedule.rank_of_stage):
        for i in range(schedule.microbatches):
            there = [kind for kind in COMPUTE if (stage, kind, i) in places]
            if "F" not in there:
                _fail(f"rank {rank}: {stage}F{i} is missing", schedule)
            if there not in (["F", "B"], ["F", "I", "W"]):
                found = " and ".join(there[1:]) or "nothing"
                what = f"the backward of stage {stage}, microbatch {i}"
                text = f"rank {rank}: {what} must be B, or I and W; found {found}"
                _fail(text, schedule, *(places[Action(stage, kind, i)] for kind in there[1:]))


def _needed(action: Action, places: dict[Action, _Place], stages: int) -> Iterator[_Place]:
    """Where the actions stand that `action` needs: the table."""
    for kind, distance in NEEDS[action.kind]:
        stage = action.stage + distance
        if 0 <= stage < stages:
            there = places.get(Action(stage, kind, action.microbatch))
            yield there or places[Action(stage, "I", action.microbatch)]


def _waits(schedule: Schedule, places: dict[Action, _Place]) -> _Exchanges:
    """By rank and slot what comes from other ranks; what comes from the own one must stand before."""
    waits: _Exchanges = []
    for rank, actions in enumerate(schedule.ranks):
        waits.append([])
        for slot, action in enumerate(actions):
            from_others = []
            for there in _needed(action, places, schedule.stages):
                if there.rank != rank:
                    from_others.append(there)
                elif there.slot > slot:
                    missing = schedule.ranks[rank][there.slot]
                    text = f"rank {rank}: {action} needs {missing}, which has not run by then"
                    _fail(text, schedule, (rank, slot))
            waits[rank].append(from_others)
    return waits


def _readers(waits: _Exchanges) -> _Exchanges:
    """The other way round: by rank and slot who on other ranks needs the action."""
    readers: _Exchanges = [[[] for _ in row] for row in waits]
    for rank, row in enumerate(waits):
        for slot, needed in enumerate(row):
            for there in needed:
                readers[there.rank][there.slot].append(_Place(rank, slot))
    return readers


def _check_ends(schedule: Schedule, waits: _Exchanges, readers: _Exchanges | None = None) -> None:
    """Let the ranks run until nothing moves; all must have come to their ends.

    A rank at slot k has run the actions before it and is exchanging tensors: what action k - 1 made,
    which blocks if `readers` are given, and what action k needs.
    """
    at = [0] * len(schedule.ranks)

    def ready(rank: int, slot: int) -> bool:
        for there in waits[rank][slot]:
            if there.slot >= at[there.rank]:
                return False
        return (
            readers is None
            or slot == 0
            or all(reader.slot <= at[reader.rank] for reader in readers[rank][slot - 1])
        )

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waits):
            slot = at[rank]
            while slot < len(row) and ready(rank, slot):
                at[rank] = slot = slot + 1
                moved = True
    stuck = [_Place(rank, slot) for rank, slot in enumerate(at) if slot < len(waits[rank])]
    if stuck:
        how = "even if sends never block" if readers is None else "if a send waits for its receive"
        ranks = ", ".join(str(place.rank) for place in stuck)
        _fail(f"the ranks {ranks} wait for each other for ever, {how}", schedule, *stuck)


def _check_held(schedule: Schedule, rank: int, weights: Sequence[int], limit: int, unit: str) -> None:
    held = 0
    for index, action in enumerate(schedule.ranks[rank]):
        if action.kind == "F":
            held += weights[action.stage]
        elif action.kind in ("B", "W"):
            held -= weights[action.stage]
        if held > limit:
            _fail(f"rank {rank}: {action} makes {held} {unit}, {limit} are allowed", schedule, (rank, index))
