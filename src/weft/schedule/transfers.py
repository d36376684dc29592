"""Where the sends and receives of a schedule stand if sends block.

A send that blocks until its receive is reached may bring ranks to wait for each other: where a rank
takes a tensor many actions after it was made, as in `looped_bfs`, its maker would wait all that time. It need
not if the receive stands where the tensor is made, not where it is used. So:

    1  the ranks run in slots; in each slot every rank whose next action has all it needs runs it
    2  after a slot, for every tensor that it made for another rank, the maker's list gets a send and the
       reader's list a receive, in the same order on all ranks

The lists come to their end with sends and receives that block: the k-th transfer of 2 is, on both of its
ranks, the next one after the k - 1 before. `torch.distributed.pipelining` places them in the same way.
"""

from __future__ import annotations

from weft.schedule.legal import check
from weft.schedule.schedule import Action, Schedule


def with_transfers(schedule: Schedule) -> list[list[Action]]:
    """The actions of each rank with SEND_F, RECV_F, SEND_B and RECV_B between them.

    `1RECV_F0` takes what `0SEND_F0` sends, `0RECV_B0` what `1SEND_B0` sends. A schedule that is not legal
    raises the ScheduleError of `legal.check`.

    >>> from weft.schedule.generators.gpipe import gpipe
    >>> print(*with_transfers(gpipe(ranks=2, microbatches=1))[0])
    0F0 0SEND_F0 0RECV_B0 0B0
    """
    check(schedule)
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    at = [0] * len(rows)
    there: set[tuple[int, str, int]] = set()
    left = sum(map(len, schedule.ranks))
    while left:
        ran = []
        for rank, actions in enumerate(schedule.ranks):
            if at[rank] < len(actions) and _needs(actions[at[rank]], schedule.stages) <= there:
                ran.append(actions[at[rank]])
                rows[rank].append(ran[-1])
                at[rank] += 1
        for action in ran:
            stage, kind, i = action
            there.add((stage, "B" if kind == "I" else kind, i))
            _transfer(schedule, rows, action)
        left -= len(ran)
    return rows


def _needs(action: Action, stages: int) -> set[tuple[int, str, int]]:
    """The results of other stages that an action needs; B stands for I too."""
    stage, kind, i = action
    if kind == "F" and stage > 0:
        return {(stage - 1, "F", i)}
    if kind in ("B", "I") and stage + 1 < stages:
        return {(stage + 1, "B", i)}
    return set()


def _transfer(schedule: Schedule, rows: list[list[Action]], action: Action) -> None:
    stage, kind, i = action
    reader = {"F": stage + 1, "B": stage - 1, "I": stage - 1, "W": -1}[kind]
    owners = schedule.rank_of_stage
    if 0 <= reader < schedule.stages and owners[reader] != owners[stage]:
        direction = "F" if kind == "F" else "B"
        rows[owners[stage]].append(Action(stage, f"SEND_{direction}", i))
        rows[owners[reader]].append(Action(reader, f"RECV_{direction}", i))
