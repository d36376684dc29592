"""The choice of a rank that does something else where it would wait.

An action list is a plan: it was made for certain costs, and stages never cost just that. weft's ranks do not wait for
the next action of their list while they can run a later one (`weft.runtime.executor`):

* of the actions that a rank could run now, it runs the one that its list names first;
* an F is begun only while the rank holds fewer than `limit` (stage, microbatch), from the begin of F to the end of
  B or W; what stands before it in the list and waits for its F keeps a place;
* microbatches start in ascending order, and the lowest that has begun may always go on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from weft.schedule.schedule import Action, in_flight


class ReadyQueue:
    """The state of one rank: which of its actions could run, which microbatches it has begun, what it holds.

    Actions are named by their position in its list.

    Args:
        actions: The list.
        ahead: How many more (stage, microbatch) than the list the rank may hold; None: never more at any point.
    """

    def __init__(self, actions: Sequence[Action], ahead: int | None) -> None:
        self.actions = actions
        self.limit = max(1, in_flight(actions) + (ahead or 0))
        self.before_forward = [
            number for number, action in enumerate(actions) if action.kind != "F" and ahead is None
        ]
        """The B, I and W that an F must wait for if they stand before it, sorted."""
        self.next: dict[int, int] = {}
        """For each microbatch the F, B or I that its program comes to next."""
        self.after = [-1] * len(actions)
        """For each F, B and I the one that its microbatch comes to after it; -1 after the last one."""
        for number in range(len(actions) - 1, -1, -1):
            _, kind, microbatch = actions[number]
            if kind != "W":
                self.after[number] = self.next.get(microbatch, -1)
                self.next[microbatch] = number
        self.unstarted = sorted(self.next, reverse=True)
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
        self.order: list[int] = []

    @property
    def done(self) -> bool:
        """True if all actions have run."""
        return len(self.order) == len(self.actions)

    def order_of_all(self) -> list[int]:
        """The places of what has run, in that order, then of what has not become possible."""
        return (
            self.order if self.done else [*self.order, *sorted({*range(len(self.actions))} - {*self.order})]
        )

    def arrive(self, number: int) -> None:
        """All that an action needs is there."""
        self.arrived[number] = True
        _, kind, microbatch = self.actions[number]
        if kind == "W":
            heappush(self.ready, number)
        elif kind == "F":
            at = bisect_left(self.entering, number)
            if at < len(self.entering) and self.entering[at] == number:
                heappush(self.could, number)
        elif self.next[microbatch] == number:
            heappush(self.ready, number)

    def choose(self) -> int:
        """The action that the rank runs now, taken from what could run; -1 if nothing could."""
        none = len(self.actions)
        while True:
            enter = self._enter() if self.could else none
            best = self.ready[0] if self.ready and self.ready[0] < enter else enter
            if self.unstarted:
                first = self.next[self.unstarted[-1]]
                if first < best and (self._room(first) or not (self.begun or self.ready)):
                    insort(self.begun, self.unstarted.pop())
                    self._come_to(first)
                    continue
            if best == none:
                return -1
            if best == enter:
                del self.entering[bisect_left(self.entering, best)]
                self.could.remove(best)
                heapify(self.could)
                self.held += 1
            else:
                heappop(self.ready)
            self.order.append(best)
            return best

    def _room(self, number: int) -> bool:
        if self.before_forward and self.before_forward[0] < number:
            return False
        return self.held + bisect_left(self.entering, number) < self.limit

    def _enter(self) -> int:
        """The first F that may begin now; the length of the list if none may."""
        first, lowest = self.could[0], self.next[self.begun[0]]
        return first if self._room(first) else lowest if lowest in self.could else len(self.actions)

    def _come_to(self, number: int) -> None:
        """A microbatch's next action is this F, B or I."""
        forward = self.actions[number].kind == "F"
        if forward:
            insort(self.entering, number)
        if self.arrived[number]:
            heappush(self.could if forward else self.ready, number)

    def end(self, number: int) -> None:
        """An action has ended: its microbatch goes on to the next one on this rank."""
        _, kind, microbatch = self.actions[number]
        if kind != "F":
            if kind != "I":
                self.held -= 1
            if self.before_forward:
                del self.before_forward[bisect_left(self.before_forward, number)]
            if kind == "W":
                return
        after = self.next[microbatch] = self.after[number]
        if after >= 0:
            self._come_to(after)
        else:
            self.begun.remove(microbatch)
