"""The discrete-event engine.

Every rank runs its list in order. In time order of these events:

    1  a rank is free, and all that its next action needs has been sent: the rank waits for it to come,
       receives it and computes; the end of that is an event of the rank
    2  a rank has computed: it sends what other ranks need, one tensor after the other; each may let a rank
       that waits go on with 1; then the rank is free
    3  a rank has run its list: it reduces gradients and runs the optimizer

Since no cost is negative, tensors are sent in the order of time, so that a shared link serves first who
came first; of two that come at once, the lower rank. `docs/design/simulation.md` has the formulas.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from weft.errors import ScheduleError
from weft.schedule.schedule import Action
from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.memory import COPIES, peak_bytes
from weft.simulate.result import Idle, Move, Simulation
from weft.simulate.wiring import Crossing, Program, Wiring, compile_rank, wire


def simulate(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    links: Links = FREE,
    *,
    edges: Sequence[Edge] = (),
    reduce_s: Sequence[float] = (),
    optimizer_s: Sequence[float] = (),
    copies: int = COPIES,
) -> Simulation:
    """The simulation of a step: who runs what when, and the peak memory of each rank.

    Args:
        actions: For each rank its list of F, B, I and W; legal, see `weft.schedule.legal`.
        rank_of_stage: The rank that runs each stage.
        costs: What each stage costs.
        links: How tensors go from rank to rank; they take no time if not given.
        edges: Tensors that skip stages, besides those from each stage to the next.
        reduce_s: For each rank how long its gradient all-reduce takes, in seconds; none if not given.
        optimizer_s: For each rank how long its optimizer takes, in seconds; none if not given.
        copies: How often the parameters count in the peak memory.

    >>> from weft.schedule import make
    >>> schedule = make("1f1b", ranks=4, microbatches=8)
    >>> step = simulate(schedule.ranks, schedule.rank_of_stage, [StageCost(1.0, 2.0)] * 4)
    >>> step.step_s, round(step.idle[0].bubble, 4)
    (33.0, 0.2727)
    """
    ranks = len(actions)
    reduce_s = reduce_s or [0.0] * ranks
    optimizer_s = optimizer_s or [0.0] * ranks
    _check(ranks, rank_of_stage, costs, edges, {"reduce_s": reduce_s, "optimizer_s": optimizer_s})
    programs = [compile_rank(rank, own, rank_of_stage, costs) for rank, own in enumerate(actions)]
    engine = _Engine(programs, wire(rank_of_stage, costs, edges, links), links)
    engine.run()
    engine.check_done(actions)
    finish_s = []
    for end, reduce, optimizer in zip(engine.free, reduce_s, optimizer_s, strict=True):
        finish_s.append((end, end + reduce, end + reduce + optimizer))
    step_s = max((end for _, _, end in finish_s), default=0.0)
    return Simulation(
        actions=tuple(map(tuple, actions)),
        start_s=tuple(map(tuple, engine.starts)),
        end_s=tuple(map(tuple, engine.ends)),
        step_s=step_s,
        idle=tuple(_idle(engine, rank, finish, step_s) for rank, finish in enumerate(finish_s)),
        peak_bytes=peak_bytes(actions, rank_of_stage, costs, copies),
        stages=len(costs),
        moves=tuple(engine.moves),
        finish_s=tuple(finish_s),
    )


class _Engine:
    """The state of all ranks while time goes on.

    What must be received for a node is kept as two numbers. A receive that can begin at `ready` and takes
    `busy` turns a rank's time t into max(t, ready) + busy; several in a row turn it into

        max(t + sum of busy, reached)      with reached' = max(reached, ready) + busy, in the order sent
    """

    def __init__(self, programs: Sequence[Program], wiring: Wiring, links: Links) -> None:
        self.programs, self.wiring = programs, wiring
        self.overlap, self.overhead_s = links.overlap, links.overhead_s
        self.points = len(wiring.needs)
        microbatches = max((max(own.nodes, default=0) for own in programs), default=0) // self.points + 1
        self.missing = wiring.needs * microbatches
        """For each node how much of what it needs has not been sent yet."""
        self.reached = [0.0] * len(self.missing)
        self.busy = [0.0] * len(self.missing)
        self.at = [0] * len(programs)
        self.waits = [True] * len(programs)
        """Whether the rank has not begun its next action."""
        self.free = [0.0] * len(programs)
        """Until when the rank is busy."""
        self.link_free: dict[str, float] = {}
        self.events: list[tuple[float, int, int]] = []
        """(time, rank, index of the crossing that it sends then)."""
        self.starts: list[list[float]] = [[] for _ in programs]
        self.ends: list[list[float]] = [[] for _ in programs]
        self.gaps = [[0.0, 0.0, 0.0] for _ in programs]
        """For each rank its idle time in warm-up, steady state and drain."""
        self.transfer_s = [0.0] * len(programs)
        """For each rank how long transfers kept it busy."""
        self.moves: list[Move] = []

    def run(self) -> None:
        """Until nothing moves."""
        for rank in range(len(self.programs)):
            self._begin(rank)
        while self.events:
            time, rank, crossing = heapq.heappop(self.events)
            self._hand_over(time, rank, crossing)

    def _begin(self, rank: int) -> None:
        """1: run the next action, if all that it needs has been sent."""
        index, program = self.at[rank], self.programs[rank]
        if index == len(program.nodes):
            return
        node = program.nodes[index]
        if self.missing[node]:
            return
        self.waits[rank] = False
        time, busy, reached = self.free[rank], self.busy[node], self.reached[node]
        begin = time + busy
        if begin < reached:
            phase = 0 if index <= program.first_backward else 1 if index <= program.last_forward else 2
            self.gaps[rank][phase] += reached - begin
            begin = reached
        if busy:
            self.moves.append((rank, "recv", node, begin - busy, begin, ""))
            self.transfer_s[rank] += busy
        end = begin + program.durations_s[index]
        self.starts[rank].append(begin)
        self.ends[rank].append(end)
        point = node % self.points
        for target in self.wiring.local[point]:
            self.missing[node - point + target] -= 1
        if self.wiring.crossings[point]:
            end += self.overhead_s
        heapq.heappush(self.events, (end, rank, 0))

    def _hand_over(self, time: float, rank: int, index: int) -> None:
        """2: send from crossing number `index` on; `time` is when that one leaves."""
        node = self.programs[rank].nodes[self.at[rank]]
        crossings = self.wiring.crossings[node % self.points]
        while index < len(crossings):
            released = self._send(time, rank, node, crossings[index])
            index += 1
            if index == len(crossings):
                time = released
            elif released + self.overhead_s > time:
                heapq.heappush(self.events, (released + self.overhead_s, rank, index))
                return
        self.transfer_s[rank] += time - self.ends[rank][-1]
        self.free[rank] = time
        self.at[rank] += 1
        self.waits[rank] = True
        self._begin(rank)

    def _send(self, time: float, rank: int, node: int, crossing: Crossing) -> float:
        """Send one tensor; returns from when on its sender is free again."""
        point, receiver, link, shared, transfer_s, occupied_s = crossing
        ready = time
        if shared:
            ready = max(time, self.link_free.get(link, 0.0))
            self.link_free[link] = ready + occupied_s
        arrival = ready + transfer_s
        busy = self.overhead_s
        if arrival > time - busy:
            self.moves.append((rank, "send", node, time - busy, arrival, link))
        if self.overlap:
            ready = arrival
        else:
            time = arrival
            busy += transfer_s
        target = node - node % self.points + point
        self.reached[target] = max(self.reached[target], ready) + busy
        self.busy[target] += busy
        self.missing[target] -= 1
        if self.waits[receiver] and not self.missing[target]:
            self._begin(receiver)
        return time

    def check_done(self, actions: Sequence[Sequence[Action]]) -> None:
        """All ranks must have come to the ends of their lists."""
        stuck = [(rank, at) for rank, at in enumerate(self.at) if at < len(actions[rank])]
        if stuck:
            where = ", ".join(f"rank {rank} before {actions[rank][at]}" for rank, at in stuck)
            raise ScheduleError(
                f"the ranks wait for ever: {where}; what they need never comes, "
                "weft.schedule.legal.check says what is wrong with the lists"
            )


def _idle(engine: _Engine, rank: int, finish_s: tuple[float, float, float], step_s: float) -> Idle:
    warmup, steady, drain = engine.gaps[rank]
    begin, _, end = finish_s
    times = (warmup, steady, drain + step_s - end, engine.transfer_s[rank], end - begin)
    return Idle(*(time / step_s for time in times)) if step_s else Idle()


def _check(
    ranks: int,
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    edges: Sequence[Edge],
    seconds: dict[str, Sequence[float]],
) -> None:
    faults = [] if costs else ["there is no stage, give the costs of at least one"]
    if len(rank_of_stage) != len(costs):
        faults.append(f"rank_of_stage names {len(rank_of_stage)} stages, but there are costs of {len(costs)}")
    for stage, rank in enumerate(rank_of_stage):
        if not 0 <= rank < ranks:
            faults.append(f"stage {stage} is on rank {rank}, but there are lists of {ranks} ranks")
    for source, target, size in edges:
        if not 0 <= source < target < len(costs):
            faults.append(
                f"an edge goes from stage {source} to {target}, it must go from an earlier "
                f"to a later one of {len(costs)} stages"
            )
        if size < 0:
            faults.append(f"the edge from stage {source} to {target} has {size} bytes")
    for name, given in seconds.items():
        if len(given) != ranks:
            faults.append(f"{name} has {len(given)} numbers, but there are {ranks} ranks")
        faults += [f"{name} of rank {rank} is {time}" for rank, time in enumerate(given) if not time >= 0]
    if faults:
        raise ScheduleError("; ".join(faults))
