"""The order in which ranks run their actions, if a rank that would wait does something else meanwhile.

An action list is a plan: it was made for certain costs, and stages never cost just that. weft's ranks do not wait for
the next action of their list while they can run a later one (`weft.runtime.executor`):

* of the actions that a rank could run now, it runs the one that its list names first;
* an F is begun only while the rank holds fewer than `limit` (stage, microbatch), from the begin of F to the end of
  B or W; what stands before it in the list and waits for its F keeps a place;
* microbatches start in ascending order, and the lowest that has begun may always go on.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from weft.schedule.schedule import Action, in_flight
from weft.simulate.costs import FREE, Edge, Links, StageCost
from weft.simulate.wiring import Program, Wiring, compile_rank, wire

ENDS, ARRIVES, FREE_AGAIN = range(3)


def executed_order(
    actions: Sequence[Sequence[Action]],
    rank_of_stage: Sequence[int],
    costs: Sequence[StageCost],
    links: Links = FREE,
    *,
    edges: Sequence[Edge] = (),
    ahead: int | None = 0,
) -> list[list[Action]]:
    """For each rank its actions in the order in which weft runs them.

    What never becomes possible stands at the end, and `simulate` says what it waits for.

    Args:
        actions: For each rank its list.
        rank_of_stage: The rank that runs each stage.
        costs: What each stage costs.
        links: How tensors go from rank to rank.
        edges: Tensors that skip stages, besides those from each stage to the next.
        ahead: How many more (stage, microbatch) than its list a rank may hold; None: never more at any point of the
            list, so no F begins before the B, I and W that stand before it have ended.

    Raises:
        ScheduleError: If a list has an action of a stage that is not on its rank.

    >>> from weft.schedule import make
    >>> made = make("1f1b", ranks=2, microbatches=3)
    >>> slow_end = [StageCost(1.0, 1.0), StageCost(3.0, 3.0)]
    >>> " ".join(map(str, executed_order(made.ranks, made.rank_of_stage, slow_end, ahead=1)[0]))
    '0F0 0F1 0F2 0B0 0B1 0B2'
    """
    wiring = wire(rank_of_stage, costs, edges, links)
    ranks = [
        _Rank(compile_rank(rank, own, rank_of_stage, costs), own, ahead) for rank, own in enumerate(actions)
    ]
    _Run(ranks, wiring, links).run()
    return [rank.actions_in_order() for rank in ranks]


class _Rank:
    """The state of one rank: which of its actions could run, which microbatches it has begun, what it holds.

    Actions are named by their position in its list.
    """

    def __init__(self, program: Program, actions: Sequence[Action], ahead: int | None) -> None:
        self.nodes, self.durations_s = program.nodes, program.durations_s
        self.actions = actions
        self.position = {node: number for number, node in enumerate(program.nodes)}
        self.limit = max(1, in_flight(actions) + (ahead or 0))
        self.before_forward = [
            number for number, action in enumerate(actions) if action.kind != "F" and ahead is None
        ]
        """The B, I and W that an F must wait for if they stand before it, sorted."""
        self.chains: dict[int, list[int]] = {}
        """For each microbatch its F, B and I in the order in which its program comes to them."""
        for number, action in enumerate(actions):
            if action.kind != "W":
                self.chains.setdefault(action.microbatch, []).append(number)
        for chain in self.chains.values():
            chain.reverse()
        self.unstarted = sorted(self.chains, reverse=True)
        self.begun: list[int] = []
        """Microbatches that have begun and not ended, ascending."""
        self.arrived = bytearray(len(actions))
        self.ready: list[int] = []
        """A heap of what could run and needs no place: B, I and W."""
        self.entering: list[int] = []
        """The F that come next for microbatches that have begun, sorted."""
        self.could: list[int] = []
        """A heap of those of them that could run."""
        self.held = 0
        self.busy = False
        self.order: list[int] = []

    def actions_in_order(self) -> list[Action]:
        never = sorted({*range(len(self.actions))} - {*self.order})
        return [self.actions[number] for number in (*self.order, *never)]

    def arrive(self, number: int) -> None:
        """All that an action needs is there."""
        self.arrived[number] = True
        _, kind, microbatch = self.actions[number]
        if kind == "W":
            heapq.heappush(self.ready, number)
        elif kind == "F":
            at = bisect_left(self.entering, number)
            if at < len(self.entering) and self.entering[at] == number:
                heapq.heappush(self.could, number)
        elif self.chains[microbatch][-1] == number:
            heapq.heappush(self.ready, number)

    def choose(self) -> int | None:
        """The action that the rank runs now: it is taken from what could run."""
        while True:
            best = self.ready[0] if self.ready else None
            enter = self._enter()
            if enter is not None and (best is None or enter < best):
                best = enter
            if self.unstarted:
                first = self.chains[self.unstarted[-1]][-1]
                if (best is None or first < best) and (self._room(first) or not (self.begun or self.ready)):
                    insort(self.begun, self.unstarted.pop())
                    self._come_to(first)
                    continue
            if best is None:
                return None
            if best == enter:
                del self.entering[bisect_left(self.entering, best)]
                self.could.remove(best)
                heapq.heapify(self.could)
                self.held += 1
            else:
                heapq.heappop(self.ready)
            self.order.append(best)
            return best

    def _room(self, number: int) -> bool:
        if self.before_forward and self.before_forward[0] < number:
            return False
        return self.held + bisect_left(self.entering, number) < self.limit

    def _enter(self) -> int | None:
        """The first F that may begin now."""
        if not self.could:
            return None
        lowest = self.chains[self.begun[0]][-1]
        return self.could[0] if self._room(self.could[0]) else lowest if lowest in self.could else None

    def _come_to(self, number: int) -> None:
        """A microbatch's next action is this F, B or I."""
        if self.actions[number].kind == "F":
            insort(self.entering, number)
        if self.arrived[number]:
            heapq.heappush(self.could if self.actions[number].kind == "F" else self.ready, number)

    def end(self, number: int) -> None:
        """An action has ended: its microbatch goes on to the next one on this rank."""
        _, kind, microbatch = self.actions[number]
        if kind in ("B", "W"):
            self.held -= 1
        if kind != "F" and self.before_forward:
            del self.before_forward[bisect_left(self.before_forward, number)]
        if kind == "W":
            return
        chain = self.chains[microbatch]
        chain.pop()
        if chain:
            self._come_to(chain[-1])
        else:
            self.begun.remove(microbatch)


class _Run:
    """Time goes on: actions end, tensors arrive, ranks that are free choose."""

    def __init__(self, ranks: Sequence[_Rank], wiring: Wiring, links: Links) -> None:
        self.ranks, self.wiring, self.links = ranks, wiring, links
        self.points = len(wiring.needs)
        self.missing: dict[int, int] = {}
        """For each node how much of what it needs has not been made yet; all of it for those that are not here."""
        self.take_s: dict[int, float] = {}
        self.link_free: dict[str, float] = {}
        self.events: list[tuple[float, int, int, int]] = []
        """(time in seconds, ENDS or ARRIVES or FREE_AGAIN, rank, node)"""

    def run(self) -> None:
        for rank in self.ranks:
            for number, node in enumerate(rank.nodes):
                if not self.wiring.needs[node % self.points]:
                    rank.arrive(number)
        for number in range(len(self.ranks)):
            self._choose(0.0, number)
        while self.events:
            now = self.events[0][0]
            touched: set[int] = set()
            while self.events and self.events[0][0] == now:
                _, what, number, node = heapq.heappop(self.events)
                rank = self.ranks[number]
                if what == ENDS:
                    heapq.heappush(self.events, (self._hand_on(now, rank, node), FREE_AGAIN, number, node))
                elif what == ARRIVES:
                    rank.arrive(rank.position[node])
                else:
                    rank.busy = False
                touched.add(number)
            for number in sorted(touched):
                self._choose(now, number)

    def _choose(self, now: float, number: int) -> None:
        rank = self.ranks[number]
        chosen = None if rank.busy else rank.choose()
        if chosen is not None:
            rank.busy = True
            node = rank.nodes[chosen]
            end = now + self.take_s.get(node, 0.0) + rank.durations_s[chosen]
            heapq.heappush(self.events, (end, ENDS, number, node))

    def _hand_on(self, now: float, rank: _Rank, node: int) -> float:
        """Send what the action has made; returns when its rank is free, in seconds."""
        rank.end(rank.position[node])
        point, base = node % self.points, node - node % self.points
        for target in self.wiring.local[point]:
            if base + target in rank.position and self._has_all(base + target):
                rank.arrive(rank.position[base + target])
        for target, receiver, link, shared, transfer_s, occupied_s in self.wiring.crossings[point]:
            now += self.links.overhead_s
            leaves = now
            if shared:
                leaves = max(now, self.link_free.get(link, 0.0))
                self.link_free[link] = leaves + occupied_s
            arrival = leaves + transfer_s
            take_s = self.links.overhead_s
            if not self.links.overlap:
                now = arrival
                take_s += transfer_s
            self.take_s[base + target] = self.take_s.get(base + target, 0.0) + take_s
            if self._has_all(base + target):
                heapq.heappush(self.events, (arrival, ARRIVES, receiver, base + target))
        return now

    def _has_all(self, node: int) -> bool:
        """One more thing that a node needs has been made: whether that was the last."""
        left = self.missing.get(node, self.wiring.needs[node % self.points]) - 1
        self.missing[node] = left
        return not left
