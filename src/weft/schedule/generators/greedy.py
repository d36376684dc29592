"""List scheduling from measured costs: any stages on any ranks, under a memory limit in bytes.

Graham, "Bounds on Multiprocessing Timing Anomalies", SIAM J. Appl. Math. 17(2), 1969: whenever a rank is free it
runs the ready action that comes first by a fixed priority. Here

    1  a backward (B or I) before everything else: another rank may wait for it
    2  then a forward that memory admits: see below
    3  then a W, the oldest first: it fills idle time, and frees memory where 2 is not admitted

Splitting a backward pass costs time of its own, so where the costs say what B takes, only the last microbatches are
split, whose W fill the wait at the end of the step; how many is tried as well, and those before run B.

Within 1 and 2 one of several policies (`POLICIES`) decides: the lowest microbatch first, or the one with the
longest way to go first (for F to the last stage, for B to the first). And microbatches enter the first
stage as early as they can, or at a pace, as a share of what the busiest rank needs for one. A W does not
start if a tensor is on its way that comes before a share of W's time, the patience, has passed. All policies
are simulated, and the shortest step is kept. Ranks compute one thing at a time; a transfer takes its
time beside that.

Memory. An activation is held from F to B or W. A rank with the limit M and stages that take T bytes
together for one microbatch admits F of microbatch i if it fits, and, unless i is the lowest microbatch k
whose forwards on this rank are not all run, if the microbatches above k keep to M - T bytes. So the lowest
unfinished microbatch always fits (the banker's algorithm, Dijkstra 1965, with the microbatches in order), its way is
never barred, and M >= T on every rank is enough for the step to come to its end. It is needed as well: all T
bytes are held when the last forward of a microbatch has run on the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from weft.errors import ScheduleError
from weft.schedule.schedule import Action, Schedule

POLICIES = (
    ("microbatch", 0.0, 0.0),
    ("microbatch", 0.0, 0.3),
    ("microbatch", 0.5, 0.0),
    ("microbatch", 0.5, 0.3),
    ("microbatch", 0.8, 0.3),
    ("microbatch", 0.8, 0.6),
    ("microbatch", 1.0, 0.0),
    ("microbatch", 1.0, 0.3),
    ("way", 0.0, 0.0),
)
"""(what goes first, pace, patience)."""
LEADERS = 2
"""So many of them are tried with some of the backward passes split."""
TRIED = 64
"""Policies are compared on that many microbatches, or two for each rank if that is more."""


@dataclass(frozen=True)
class ListCost:
    """The cost of one microbatch in one stage.

    `backward_s` is the whole backward pass (B) where `weight_s` is not given, else that of the inputs (I). `whole_s` is
    B beside these two: then every microbatch may run either.
    `transfer_s` is how long the result takes to the next stage, and its gradient back, if that is on another rank.
    """

    rank: int
    forward_s: float
    backward_s: float
    weight_s: float | None = None
    activation_bytes: int = 0
    transfer_s: float = 0.0
    whole_s: float | None = None


def greedy(
    stages: Sequence[ListCost], microbatches: int, memory_bytes: Sequence[int] | None = None
) -> Schedule:
    """A schedule for `stages` in the order in which a microbatch visits them.

    Args:
        stages: A rank may appear several times, and unevenly; each of 0, 1, ... must appear.
        microbatches: How many microbatches make the step, at least 1.
        memory_bytes: What the activations on each rank may take together; no limit if not given.

    >>> print(*greedy([ListCost(0, 1.0, 1.0, 1.0), ListCost(1, 1.0, 1.0, 1.0)], 2).ranks[1])
    1F0 1I0 1F1 1I1 1W0 1W1
    """
    faults = _faults(stages, microbatches, memory_bytes)
    if faults:
        raise ScheduleError("; ".join(faults))
    ranks = 1 + max(stage.rank for stage in stages)
    some = min(microbatches, max(TRIED, 2 * ranks))

    def run(policy: tuple[str, float, float], split: int, microbatches: int = some) -> _Run:
        return _Run(stages, microbatches, memory_bytes, policy, split).finish()

    tried = [run(policy, microbatches) for policy in POLICIES]
    if any(stage.whole_s is not None for stage in stages):
        tried += [run(policy, 0) for policy in POLICIES]
        leaders = dict.fromkeys(one.policy for one in sorted(tried, key=_end_s)[:LEADERS])
        tried += [run(policy, split) for policy in leaders for split in _numbers(some, ranks)]
    best = min(tried, key=_end_s)
    if some < microbatches:
        best = run(best.policy, best.split, microbatches)
    first = stages[0]
    joins = first.whole_s is not None and first.whole_s <= first.backward_s + (first.weight_s or 0.0)
    rows = map(_joined, best.rows) if joins else best.rows
    return Schedule("list", tuple(map(tuple, rows)), tuple(stage.rank for stage in stages))


def _joined(row: Sequence[Action]) -> list[Action]:
    """A rank's actions with B where the first stage, for whose gradient nobody waits, has I and at once W."""
    joined: list[Action] = []
    for action in row:
        if action.kind == "W" and joined and joined[-1] == (0, "I", action.microbatch) and action.stage == 0:
            joined[-1] = action._replace(kind="B")
        else:
            joined.append(action)
    return joined


def _end_s(run: _Run) -> float:
    return run.end_s


def _numbers(microbatches: int, ranks: int) -> list[int]:
    """The numbers of microbatches to split: few, because only the end of the step has time to fill.

    >>> _numbers(8, 2), _numbers(2, 4)
    ([1, 2, 3, 4], [1])
    """
    most = min(microbatches - 1, 2 * ranks)
    return sorted(
        {number for number in (1, 2, 3, *(most >> shift for shift in range(8))) if 0 < number <= most}
    )


def _faults(stages: Sequence[ListCost], microbatches: int, memory_bytes: Sequence[int] | None) -> list[str]:
    faults = []
    if not stages:
        return ["there are no stages, give the cost of at least one"]
    if microbatches < 1:
        faults.append(f"microbatches is {microbatches}, it must be at least 1")
    for number, stage in enumerate(stages):
        numbers = ("rank", "forward_s", "backward_s", "weight_s", "activation_bytes", "transfer_s", "whole_s")
        for name in numbers:
            value = getattr(stage, name)
            if value is not None and not 0 <= value < float("inf"):
                faults.append(f"{name} of stage {number} is {value}, it must be finite and not negative")
    ranks = 1 + max(stage.rank for stage in stages)
    idle = sorted(set(range(ranks)) - {stage.rank for stage in stages})
    faults += [f"rank {rank} has no stage, but rank {ranks - 1} has" for rank in idle]
    if memory_bytes is None:
        return faults
    if len(memory_bytes) != ranks:
        return [*faults, f"memory_bytes has {len(memory_bytes)} numbers, but there are {ranks} ranks"]
    for rank, limit in enumerate(memory_bytes):
        needed = sum(stage.activation_bytes for stage in stages if stage.rank == rank)
        if needed > limit:
            faults.append(
                f"rank {rank} needs {needed} bytes for the activations of one microbatch, and has {limit}: "
                "make the microbatches smaller, or give the rank fewer stages"
            )
    return faults


class _Run:
    """One simulation of the step. Every stage takes its microbatches in order, so counters are its state."""

    def __init__(
        self,
        stages: Sequence[ListCost],
        microbatches: int,
        memory_bytes: Sequence[int] | None,
        policy: tuple[str, float, float],
        split: int,
    ) -> None:
        self.stages, self.microbatches, self.memory_bytes = stages, microbatches, memory_bytes
        self.policy, self.split = policy, split
        first, pace, patience = policy
        self.by_way, self.patience = first == "way", patience
        ranks = 1 + max(stage.rank for stage in stages)
        self.own = [[s for s, stage in enumerate(stages) if stage.rank == rank] for rank in range(ranks)]
        self.whole = [sum(stages[s].activation_bytes for s in own) for own in self.own]
        self.forwards, self.backwards = ([0] * len(stages) for _ in range(2))
        self.weights = [self._first_split(stage) for stage in stages]
        self.inputs: list[list[float]] = [[] for _ in stages]
        self.gradients: list[list[float]] = [[] for _ in stages]
        self.busy_until, self.held = [0.0] * ranks, [0] * ranks
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.end_s = 0.0
        busiest = max(sum(self._work(stages[s]) for s in own) for own in self.own)
        self.inputs[0] = [pace * busiest * i for i in range(microbatches)]
        self.events = [(0.0, rank) for rank in range(ranks)]
        self.events += [(time, stages[0].rank) for time in self.inputs[0]]
        heapify(self.events)

    def _first_split(self, stage: ListCost) -> int:
        """The first microbatch whose backward pass is I and W there."""
        if stage.weight_s is None:
            return self.microbatches
        return 0 if stage.whole_s is None else max(0, self.microbatches - self.split)

    def _work(self, stage: ListCost) -> float:
        """The seconds of a microbatch there, split as most are that may be."""
        whole_s = stage.backward_s if stage.whole_s is None else stage.whole_s
        halves_s = stage.backward_s + (stage.weight_s or 0.0)
        return stage.forward_s + (whole_s if self._first_split(stage) else halves_s)

    def finish(self) -> _Run:
        """Run the step to its end."""
        while self.events:
            now, rank = heappop(self.events)
            if self.busy_until[rank] <= now:
                action = self._choose(rank, now)
                if action is not None:
                    self._start(rank, action, now)
        return self

    def _choose(self, rank: int, now: float) -> Action | None:
        ready = [
            (self.backwards[s], -s)
            for s in self.own[rank]
            if self.backwards[s] < len(self.gradients[s]) and self.gradients[s][self.backwards[s]] <= now
        ]
        if ready:
            microbatch, stage = min(ready, key=lambda it: it[1]) if self.by_way else min(ready)
            whole = microbatch < self._first_split(self.stages[-stage])
            return Action(-stage, "B" if whole else "I", microbatch)
        ready = [
            (self.forwards[s], -s)
            for s in self.own[rank]
            if self.forwards[s] < len(self.inputs[s])
            and self.inputs[s][self.forwards[s]] <= now
            and self._admits(rank, s)
        ]
        if ready:
            microbatch, stage = max(ready, key=lambda it: it[1]) if self.by_way else min(ready)
            return Action(-stage, "F", microbatch)
        ready = [(self.weights[s], -s) for s in self.own[rank] if self.weights[s] < self.backwards[s]]
        if ready:
            microbatch, stage = min(ready)
            if self._next_arrival(rank, now) > now + self.patience * (self.stages[-stage].weight_s or 0.0):
                return Action(-stage, "W", microbatch)
        return None

    def _next_arrival(self, rank: int, now: float) -> float:
        """When the next tensor comes that is on its way to the rank already."""
        coming = [
            arrivals[s][done[s]]
            for arrivals, done in ((self.gradients, self.backwards), (self.inputs, self.forwards))
            for s in self.own[rank]
            if done[s] < len(arrivals[s])
        ]
        return min((time for time in coming if time > now), default=float("inf"))

    def _admits(self, rank: int, stage: int) -> bool:
        """True if the next forward of `stage` fits and leaves room for the lowest microbatch."""
        if self.memory_bytes is None:
            return True
        limit, size = self.memory_bytes[rank], self.stages[stage].activation_bytes
        lowest = min(self.forwards[s] for s in self.own[rank])
        above = sum(
            self.stages[s].activation_bytes * max(0, self.forwards[s] - lowest - 1) for s in self.own[rank]
        )
        if self.forwards[stage] > lowest and above + size > limit - self.whole[rank]:
            return False
        return self.held[rank] + size <= limit

    def _start(self, rank: int, action: Action, now: float) -> None:
        s, kind, _ = action
        cost = self.stages[s]
        self.rows[rank].append(action)
        if kind == "F":
            end = now + cost.forward_s
            self.forwards[s] += 1
            self.held[rank] += cost.activation_bytes
            if s + 1 < len(self.stages):
                self._arrive(self.inputs, s + 1, end, rank, cost.transfer_s)
            else:
                self._arrive(self.gradients, s, end, rank, 0.0)
        elif kind == "W":
            end = now + (cost.weight_s or 0.0)
            self.weights[s] += 1
        else:
            end = now + (cost.backward_s if kind == "I" or cost.whole_s is None else cost.whole_s)
            self.backwards[s] += 1
            if s > 0:
                self._arrive(self.gradients, s - 1, end, rank, self.stages[s - 1].transfer_s)
        if kind in "BW":
            self.held[rank] -= cost.activation_bytes
        self.busy_until[rank] = end
        self.end_s = max(self.end_s, end)
        heappush(self.events, (end, rank))

    def _arrive(self, where: list[list[float]], stage: int, end: float, rank: int, transfer_s: float) -> None:
        reader = self.stages[stage].rank
        time = end if reader == rank else end + transfer_s
        where[stage].append(time)
        heappush(self.events, (time, reader))
