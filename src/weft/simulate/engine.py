"""The discrete-event engine: the one place where time goes on.

Every rank runs one action after the other, in the order of its list (`InOrder`), or what is ready and comes first in it
(`OutOfOrder`). What an action makes stays on its rank, or is sent over links. Since no cost is negative, tensors are
sent in the order of time, so that a shared link serves first who came first; of two that come at once, the lower rank.
`docs/design/simulation.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from weft.simulate.costs import Links
from weft.simulate.ready_queue import ReadyQueue
from weft.simulate.result import Move
from weft.simulate.wiring import Crossing, Program, Wiring


class Engine:
    """The state of a step while time goes on, the same in whichever order ranks run their actions."""

    def __init__(self, programs: Sequence[Program], wiring: Wiring, links: Links) -> None:
        self.programs, self.wiring = programs, wiring
        self.overlap, self.overhead_s = links.overlap, links.overhead_s
        self.points = len(wiring.needs)
        microbatches = max((max(own.nodes, default=0) for own in programs), default=0) // self.points + 1
        self.missing = wiring.needs * microbatches
        """For each node how much of what it needs has not been made, or sent, yet."""
        self.busy = [0.0] * len(self.missing)
        """For each node how long its rank takes to receive what it needs, in seconds."""
        self.free = [0.0] * len(programs)
        """Until when each rank is busy."""
        self.link_free: dict[str, float] = {}
        self.starts: list[list[float]] = [[] for _ in programs]
        self.ends: list[list[float]] = [[] for _ in programs]
        self.transfer_s = [0.0] * len(programs)
        """For each rank how long transfers kept it busy."""
        self.moves: list[Move] = []

    def waits_s(self, rank: int) -> list[float]:
        """The seconds in which a rank had nothing to do before each of its actions."""
        before = [0.0, *self.ends[rank]]
        return [start - end for start, end in zip(self.starts[rank], before, strict=False)]

    def leave(self, time: float, link: str, occupied_s: float) -> float:
        """When a tensor leaves that its rank sends at a time: once a shared link is free, which it then occupies."""
        time = max(time, self.link_free.get(link, 0.0))
        self.link_free[link] = time + occupied_s
        return time


class InOrder(Engine):
    """Each rank runs its list in order. In time order of these events:

        1  a rank is free, and all that its next action needs has been sent: the rank waits for it to come,
           receives it and computes; the end of that is an event of the rank
        2  a rank has computed: it sends what other ranks need, one tensor after the other; each may let a rank
           that waits go on with 1; then the rank is free

    What must be received for a node is kept as two numbers. A receive that can begin at `ready` and takes
    `busy` turns a rank's time t into max(t, ready) + busy; several in a row turn it into

        max(t + sum of busy, reached)      with reached' = max(reached, ready) + busy, in the order sent
    """

    def __init__(self, programs: Sequence[Program], wiring: Wiring, links: Links) -> None:
        super().__init__(programs, wiring, links)
        self.reached = [0.0] * len(self.missing)
        self.waits: list[list[float]] = [[] for _ in programs]
        self.idle = [True] * len(programs)
        """For each rank, True as long as it has not begun its next action."""
        self.events: list[tuple[float, int, int]] = []
        """(time, rank, index of the crossing that it sends then)."""

    def waits_s(self, rank: int) -> list[float]:
        """Receives, which begin when there is something to take, are no wait."""
        return self.waits[rank]

    def run(self) -> None:
        """Until nothing moves."""
        for rank in range(len(self.programs)):
            self._begin(rank)
        while self.events:
            self._hand_over(*heappop(self.events))

    def _begin(self, rank: int) -> None:
        """1: run the next action, if all that it needs has been sent."""
        nodes, durations_s = self.programs[rank]
        starts = self.starts[rank]
        index = len(starts)
        if index == len(nodes):
            return
        node = nodes[index]
        if self.missing[node]:
            return
        self.idle[rank] = False
        busy, reached = self.busy[node], self.reached[node]
        begin = self.free[rank] + busy
        wait = 0.0
        if begin < reached:
            wait = reached - begin
            begin = reached
        self.waits[rank].append(wait)
        if busy:
            self.moves.append((rank, "recv", node, begin - busy, begin, ""))
            self.transfer_s[rank] += busy
        end = begin + durations_s[index]
        starts.append(begin)
        self.ends[rank].append(end)
        point = node % self.points
        for target in self.wiring.local[point]:
            self.missing[node - point + target] -= 1
        if self.wiring.crossings[point]:
            end += self.overhead_s
        heappush(self.events, (end, rank, 0))

    def _hand_over(self, time: float, rank: int, index: int) -> None:
        """2: send from crossing number `index` on; `time` is when that one leaves."""
        ends = self.ends[rank]
        node = self.programs[rank].nodes[len(ends) - 1]
        crossings = self.wiring.crossings[node % self.points]
        while index < len(crossings):
            released = self._send(time, rank, node, crossings[index])
            index += 1
            if index == len(crossings):
                time = released
            elif released + self.overhead_s > time:
                heappush(self.events, (released + self.overhead_s, rank, index))
                return
        self.transfer_s[rank] += time - ends[-1]
        self.free[rank] = time
        self.idle[rank] = True
        self._begin(rank)

    def _send(self, time: float, rank: int, node: int, crossing: Crossing) -> float:
        """Send one tensor; returns from when on its sender is free again."""
        point, receiver, link, shared, transfer_s, occupied_s = crossing
        ready = self.leave(time, link, occupied_s) if shared else time
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
        if ready > self.reached[target]:
            self.reached[target] = ready
        if busy:
            self.reached[target] += busy
            self.busy[target] += busy
        self.missing[target] -= 1
        if self.idle[receiver] and not self.missing[target]:
            self._begin(receiver)
        return time


ENDS, FREE_AGAIN = -1, -2


class OutOfOrder(Engine):
    """Each rank runs what is ready, as `ReadyQueue` chooses. In time order:

        1  actions end: what they made stays there, or is sent, all tensors of an action at once
        2  tensors arrive, and ranks that have sent theirs are free
        3  when all that happens at a time has happened, ranks that are free choose and begin

    An action begins when all that it needs has come, and then takes its receives one after the other: times are those
    of a step only where links keep no rank busy, and none is shared (`exact`). Otherwise they only give the order.
    """

    def __init__(
        self, programs: Sequence[Program], wiring: Wiring, links: Links, queues: Sequence[ReadyQueue]
    ) -> None:
        super().__init__(programs, wiring, links)
        self.queues = queues
        self.position = [-1] * len(self.missing)
        """For each node its place in the list of its rank; -1 if no list has it."""
        self.running = [-1] * len(programs)
        """For each rank the place of the action that it runs or sends from; -1 if it is free."""
        self.events: list[tuple[float, int, int]] = []
        """(time, rank, place in its list of what has arrived; or ENDS or FREE_AGAIN)."""

    @property
    def exact(self) -> bool:
        """True if all has run, and the times are those that `InOrder` finds for the same order."""
        crossings = [crossing for each in self.wiring.crossings for crossing in each]
        once = len({crossing.target for crossing in crossings}) == len(crossings)
        shared = any(crossing.shared for crossing in crossings)
        done = all(queue.done for queue in self.queues)
        return done and self.overlap and not self.overhead_s and not shared and once

    def run(self) -> None:
        """Until nothing moves."""
        for own, queue in zip(self.programs, self.queues, strict=True):
            for number, node in enumerate(own.nodes):
                self.position[node] = number
            for number, node in enumerate(own.nodes):
                if not self.missing[node]:
                    queue.arrive(number)
        for rank in range(len(self.programs)):
            self._choose(0.0, rank)
        events, running, queues = self.events, self.running, self.queues
        while events:
            now = events[0][0]
            touched: set[int] = set()
            while events and events[0][0] == now:
                _, rank, what = heappop(events)
                touched.add(rank)
                if what == ENDS:
                    self._hand_on(now, rank, touched)
                elif what == FREE_AGAIN:
                    running[rank] = -1
                else:
                    queues[rank].arrive(what)
            for rank in touched:
                if running[rank] < 0:
                    self._choose(now, rank)

    def _choose(self, now: float, rank: int) -> None:
        """3: begin an action, if one is ready."""
        chosen = self.queues[rank].choose()
        if chosen < 0:
            return
        self.running[rank] = chosen
        nodes, durations_s = self.programs[rank]
        end = now + self.busy[nodes[chosen]] + durations_s[chosen]
        self.starts[rank].append(now)
        self.ends[rank].append(end)
        self.free[rank] = end
        heappush(self.events, (end, rank, ENDS))

    def _hand_on(self, now: float, rank: int, touched: set[int]) -> None:
        """1: send what the action has made; those to which it comes at once are among the touched."""
        missing, position, time = self.missing, self.position, now
        number, queue = self.running[rank], self.queues[rank]
        node = self.programs[rank].nodes[number]
        point = node % self.points
        base = node - point
        queue.end(number)
        for target in self.wiring.local[point]:
            target += base
            missing[target] -= 1
            if not missing[target] and position[target] >= 0:
                queue.arrive(position[target])
        for target, receiver, link, shared, transfer_s, occupied_s in self.wiring.crossings[point]:
            busy = self.overhead_s
            time += busy
            arrival = (self.leave(time, link, occupied_s) if shared else time) + transfer_s
            if arrival > time:
                self.moves.append((rank, "send", node, time, arrival, link))
            if not self.overlap:
                time = arrival
                busy += transfer_s
            target += base
            self.busy[target] += busy
            missing[target] -= 1
            if missing[target] or position[target] < 0:
                continue
            if arrival > now:
                heappush(self.events, (arrival, receiver, position[target]))
            else:
                self.queues[receiver].arrive(position[target])
                touched.add(receiver)
        if time > now:
            heappush(self.events, (time, rank, FREE_AGAIN))
        else:
            self.running[rank] = -1
