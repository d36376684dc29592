"""V-shaped schedules that repeat one building block, for `v_half` and `v_min`.

Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362. Rank `r` of `p` has the
stages r and 2p - 1 - r. Let F, I and W take one slot each. Then a microbatch needs six slots of a rank, and one
follows the other every six slots:

    1  A block says when a microbatch's F and I run in each stage: `pace` slots from one stage to the next
       on each of its four legs (F down, F up, I down, I up the V), `gaps` slots where it turns.
    2  It can be repeated if on no rank two of its actions fall on the same slot modulo 6. W takes
       what is left.
    3  From F to W it holds an activation. The sum of that over a rank's two stages, divided by 6, is
       what the rank holds in the steady state. Short legs: little memory, long waits.
    4  The order of F and I on each rank is that of the repeated block. The slots before the first and
       after the last microbatch are squeezed out: each rank runs its next F or I as soon as it can,
       and a W when it cannot, or when the next F would exceed what the steady state holds.

Where this differs: the paper gives its blocks as formulas and then shifts W by rules; here the gaps are
searched for (the least memory first, then the shortest block) and W is placed by 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from weft.schedule.schedule import Action, Schedule, vee

SLOTS = 6
Pace = tuple[int, int, int, int]


class Block(NamedTuple):
    """When one microbatch runs: `forward[s]` and `backward[s]` are the slots of F and I in stage `s`."""

    held: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]


def repeat(name: str, pace: Pace, ranks: int, microbatches: int) -> Schedule:
    """The schedule that repeats the best block with this `pace`."""
    block = find(pace, ranks)
    order = [_order(rank, block, microbatches) for rank in range(ranks)]
    return Schedule(name, _fill(order, block.held), vee(ranks))


def find(pace: Pace, ranks: int) -> Block:
    """The block that holds the fewest (stage, microbatch) on a rank, of those the shortest.

    >>> find((1, 1, 1, 1), ranks=2)
    Block(held=4, forward=(0, 1, 2, 3), backward=(7, 6, 5, 4))
    """
    blocks = []
    for gaps in sorted(product(range(1, SLOTS + 1), repeat=3), key=lambda gaps: (sum(gaps), gaps)):
        forward, backward = _legs(pace, gaps, ranks)
        held = [_held(rank, forward, backward) for rank in range(ranks)]
        if all(held):
            blocks.append(Block(max(held), tuple(forward), tuple(backward)))
    return min(blocks, key=lambda block: block.held)


def _legs(pace: Pace, gaps: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """The slots of F and of I by stage: 1."""
    steps = [[length] * (ranks - 1) for length in pace]
    slot, slots = 0, [0]
    for step in (*steps[0], gaps[0], *steps[1], gaps[1], *steps[2], gaps[2], *steps[3]):
        slot += step
        slots.append(slot)
    return slots[: 2 * ranks], slots[: 2 * ranks - 1 : -1]


def _held(rank: int, forward: Sequence[int], backward: Sequence[int]) -> int:
    """The most microbatches that the rank holds in the steady state; 0 if two actions fall on one slot: 2 and 3."""
    stages = (rank, len(forward) - 1 - rank)
    starts, ends = [forward[s] for s in stages], [backward[s] for s in stages]
    free = set(range(SLOTS)) - {slot % SLOTS for slot in (*starts, *ends)}
    if len(free) != 2:
        return 0
    return min(
        _peak(starts, [end + 1 + (slot - end - 1) % SLOTS for end, slot in zip(ends, slots, strict=True)])
        for slots in (sorted(free), sorted(free, reverse=True))
    )


def _peak(starts: Sequence[int], ends: Sequence[int]) -> int:
    """The most that are held at once if each starts and ends anew every six slots, the slot of the end included."""
    spans = list(zip(starts, ends, strict=True))
    return max(
        sum((slot - start) // SLOTS - (slot - end - 1) // SLOTS for start, end in spans)
        for slot in range(SLOTS)
    )


def _order(rank: int, block: Block, microbatches: int) -> list[Action]:
    """F and I of the rank by slot, the block repeated."""
    stages = (rank, len(block.forward) - 1 - rank)
    slots = [(block.forward[stage], stage, "F") for stage in stages]
    slots += [(block.backward[stage], stage, "I") for stage in stages]
    period = [
        (slot // SLOTS, stage, kind) for slot, stage, kind in sorted(slots, key=lambda it: it[0] % SLOTS)
    ]
    return [
        Action(stage, kind, number - delay)
        for number in range(microbatches + block.backward[0] // SLOTS)
        for delay, stage, kind in period
        if 0 <= number - delay < microbatches
    ]


def _fill(order: Sequence[Sequence[Action]], limit: int) -> tuple[tuple[Action, ...], ...]:
    """Run the ranks slot by slot, W where the order leaves room: 4."""
    last = 2 * len(order) - 1
    forwards, backwards = [0] * (last + 1), [0] * (last + 1)
    rows: list[list[Action]] = [[] for _ in order]
    waiting: list[deque[Action]] = [deque() for _ in order]
    left = [deque(actions) for actions in order]
    held = [0] * len(order)

    def may_run(rank: int, action: Action) -> bool:
        stage, kind, i = action
        if kind == "F":
            return held[rank] < limit and (stage == 0 or forwards[stage - 1] > i)
        return stage == last or backwards[stage + 1] > i

    running = True
    while running:
        chosen = [
            left[rank].popleft()
            if left[rank] and may_run(rank, left[rank][0])
            else waiting[rank].popleft()
            if waiting[rank]
            else None
            for rank in range(len(order))
        ]
        running = any(chosen)
        for rank, action in enumerate(chosen):
            if action is None:
                continue
            rows[rank].append(action)
            stage, kind, i = action
            if kind == "F":
                forwards[stage] += 1
                held[rank] += 1
            elif kind == "I":
                backwards[stage] += 1
                waiting[rank].append(Action(stage, "W", i))
            else:
                held[rank] -= 1
    return tuple(map(tuple, rows))
