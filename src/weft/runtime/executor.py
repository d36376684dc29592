"""One rank obeying its action list.

The schedule's list gives each (phase, stage, microbatch) of this rank a position, and the most (stage, microbatch)
it holds in flight. Whenever a microbatch must wait for a tensor, or enters another stage or its backward pass, the
turn goes to the one that could run and stands first in the list; one enters a stage only below the limit. Weight
gradients that the backward pass left for later are tasks of their own, with positions in the list too.
So a static program follows the list exactly, and one whose control flow differs from what the
list foresaw (a partition visited again, an early exit) still never deadlocks: every rank starts
microbatches in ascending order, so the lowest unfinished one is started everywhere or next to start.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.errors import DivergenceError, StallError
from weft.runtime.lockstep import LockstepOrder, Turn, differing
from weft.runtime.microbatch import Microbatch, Worker
from weft.schedule.order import LAST, Order
from weft.timeline import Span
from weft.transport.channel import Mailbox

POLL_S = 1.0
PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


@dataclass
class Hooks:
    """The calls of a frontend before a microbatch goes on (random states, say), and those that report.

    ``note(phase, microbatch, peer)``: what it turns to; ``locate(error)``: an error was raised just now; ``leave()`` is
    called by a thread that worked and gives the turn to another. ``record(kind, microbatch, start_s, end_s, peer,
    stage)`` gets every span, as far as one is set: work, waits (for ``peer``) and the whole step.
    """

    resume: Callable[[Microbatch], None] = lambda microbatch: None
    note: Callable[[str, int | None, int | None], None] = lambda phase, microbatch, peer: None
    locate: Callable[[BaseException], None] = lambda error: None
    leave: Callable[[], None] = lambda: None
    record: Callable[[str, int, float, float, int, int], None] | None = None


@dataclass(frozen=True)
class Checks:
    """Checks that the ranks of one step agree: both raise if the ranks have diverged.

    ``before_wait()`` is called before every wait, ``while_waiting(seconds)`` once a second while one lasts.
    """

    before_wait: Callable[[], None] = lambda: None
    while_waiting: Callable[[float], None] = lambda seconds: None


NO_CHECKS = Checks()


@dataclass
class Executor:
    """Runs the microbatches of a step on this rank. ``mailbox`` is where their messages arrive.

    ``wait_timeout_s``: how long nothing may arrive while every microbatch waits; then :class:`StallError`.
    ``turns``: whose turns this rank takes, where ranks must run their microbatches in one order.
    """

    mailbox: Mailbox
    rank: int = 0
    wait_timeout_s: float = 600.0
    hooks: Hooks = field(default_factory=Hooks)
    turns: LockstepOrder | None = None

    def __post_init__(self) -> None:
        self.spans: list[Span] = []
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._back = threading.Lock()
        self._back.acquire()
        self._given = False
        """Whether the turn was given back, just before the lock is released."""
        self._active: list[Microbatch] = []
        self._held: set[tuple[int, int]] = set()
        self._before_forward: list[tuple[int, tuple[str, int, int]]] = []
        self._tasks: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._interrupted = False
        self._slice_start = 0.0
        self._slice = "F", 0

    def run(
        self, bodies: Sequence[Callable[[Microbatch], Any]], order: Order, checks: Checks = NO_CHECKS
    ) -> list[Any]:
        """The results of all bodies, in order of microbatch, when every body has come to its end.

        The first error of a body is raised after the others were unwound; a failure of the
        mailbox (a peer failed) likewise.
        """
        self.spans = []
        self.order, self._checks = order, checks
        self._held, self._tasks = set(), {}
        self._before_forward = order.before_forward()
        self._interrupted = False
        everything: list[Microbatch] = []
        for index, body in enumerate(bodies):
            before = everything[-1] if everything else None
            everything.append(Microbatch(index, body, order.first, before))
        self._waiting = everything[::-1]
        self._active = []
        self._context = contextvars.copy_context()
        began = time.perf_counter()
        try:
            while self._waiting or self._active or self._tasks:
                seen = self.mailbox.arrivals
                chosen = self._choose()
                if chosen is None:
                    self._sleep(seen)
                    continue
                self._settle(chosen)
                if not isinstance(chosen, Microbatch):
                    self._weights(*chosen)
                    continue
                self.hooks.leave()
                self._given = False
                self._resume(chosen)
                try:
                    self._back.acquire()
                except BaseException:  # an interrupt: whoever has the turn gives it back, then all unwind
                    self._interrupted = True
                    self._regain()
                    raise
                error = next((m.error for m in everything if m.error is not None), None)
                if error is not None:
                    raise error
        finally:
            self._unwind()
            self._record("step", -1, began)
        return [microbatch.result for microbatch in everything]

    def _regain(self) -> None:
        """Wait for the turn after an interrupt, which may have come when the lock was acquired already."""
        while not self._given:
            time.sleep(POLL_S / 10)
        self._back.acquire(timeout=1)

    def _choose(self) -> Microbatch | tuple[int, int] | None:
        """The task that runs next: the best one by the list, or the one that another rank has chosen."""
        if self.turns is None or self.turns.leads:
            return self._best()
        turn = self.turns.next_turn()
        return None if turn is None else self._find(turn)

    def _find(self, turn: Turn) -> Microbatch | tuple[int, int] | None:
        """The task that another rank has chosen; None as long as it cannot run here.

        Raises:
            DivergenceError: This rank has nothing to do there, or its microbatch waits for another message.
        """
        index, stage, waited = turn
        if stage >= 0 and (stage, index) in self._tasks:
            return stage, index
        if stage < 0 and self._waiting and self._waiting[-1].index == index:
            return self._waiting[-1]
        own = next((m for m in self._active if stage < 0 and m.index == index), None)
        if own is not None:
            if waited and waited != own.waits_for:
                what = f"goes on with microbatch {index}, which has waited for {waited}"
                raise DivergenceError(differing(what, f"waits there for {own.waits_for} ({own.what})"))
            return own if own.ready(self.mailbox) else None
        what = f"goes on with {'weight gradients of ' * (stage >= 0)}microbatch {index}"
        raise DivergenceError(differing(what, "has nothing left to do there"))

    def _settle(self, chosen: Microbatch | tuple[int, int]) -> None:
        """It has the turn now: announce it to the ranks that take the same turns."""
        if self.turns is None:
            return
        if not self.turns.leads:
            self.turns.taken()
        elif isinstance(chosen, Microbatch):
            self.turns.announce(
                Turn(chosen.index, waited=chosen.waits_for if self.turns.same_samples else "")
            )
        else:
            stage, index = chosen
            self.turns.announce(Turn(index, stage))

    def _best(self) -> Microbatch | tuple[int, int] | None:
        """Of those that could run, the one whose next action the list names first; (stage, microbatch) for a W."""
        best: Microbatch | tuple[int, int] | None = None
        best_position = LAST + 1
        place = self.order.position.get
        entering = [place(("F", m.stage, m.index), LAST) for m in self._active if m.entering]

        def room(position: int) -> bool:
            """True if a stage may be entered: whoever waits to, and comes first in the list, keeps a place."""
            if self._before_forward and self._before_forward[0][0] < position:
                return False
            return len(self._held) + sum(other < position for other in entering) < self.order.limit

        for number, microbatch in enumerate(self._active):
            if not microbatch.ready(self.mailbox):
                continue
            position = place((microbatch.phase, microbatch.stage, microbatch.index), LAST)
            if microbatch.entering and number and not room(position):  # the lowest may always go on
                continue
            if position < best_position:
                best, best_position = microbatch, position
        if self._waiting:
            new = self._waiting[-1]
            position = place(("F", new.stage, new.index), LAST)
            if position < best_position and (room(position) or not (self._active or self._tasks)):
                best, best_position = new, position
        for stage, index in self._tasks:
            position = place(("W", stage, index), LAST)
            if position < best_position:
                best, best_position = (stage, index), position
        return best

    def _weights(self, stage: int, index: int) -> None:
        """W: the weight gradients that a backward pass has left for now."""
        self.hooks.note(PHASES["W"], index, None)
        start = time.perf_counter()
        for task in self._tasks.pop((stage, index)):
            task()
        self._has_run(("W", stage, index))
        self._release(stage, index)
        self._span("W", index, start, stage)

    def _release(self, stage: int, index: int) -> None:
        """The stage is done with the microbatch; the rank's first one only when its program has ended."""
        if stage != self.order.first or all(microbatch.index != index for microbatch in self._active):
            self._held.discard((stage, index))

    def let_go(self, microbatch: Microbatch) -> None:
        """The microbatch keeps others from entering no longer: it has gone backward through all that it held."""
        self._held.discard((microbatch.stage, microbatch.index))

    def _has_run(self, *actions: tuple[str, int, int]) -> None:
        """No F waits for these any more."""
        if self._before_forward:
            self._before_forward = [one for one in self._before_forward if one[1] not in actions]

    def completed(self, microbatch: Microbatch, tasks: Sequence[Callable[[], None]]) -> None:
        """The backward pass of the microbatch's present stage is done, but for ``tasks``."""
        place = microbatch.stage, microbatch.index
        self._has_run(("B", *place))
        if tasks:
            self._tasks.setdefault(place, []).extend(tasks)
        else:
            self._release(*place)

    def _resume(self, microbatch: Microbatch) -> None:
        if microbatch.worker is None:
            self._waiting.pop()
            self._active.append(microbatch)
            microbatch.executor = self
            microbatch.worker = self._idle.pop() if self._idle else self._new_worker()
            context = self._context.copy()
            microbatch.worker.start(lambda: self._first(microbatch, context))
        else:
            self._begin_slice(microbatch)
        microbatch.worker.go()

    def _first(self, microbatch: Microbatch, context: contextvars.Context) -> None:
        self._begin_slice(microbatch)
        microbatch.run(context)

    def _begin_slice(self, microbatch: Microbatch) -> None:
        self.hooks.resume(microbatch)
        self._enter(microbatch)
        self.hooks.note(PHASES[microbatch.phase], microbatch.index, None)
        self._slice = self._doing(microbatch)
        self._slice_start = time.perf_counter()

    def _enter(self, microbatch: Microbatch) -> None:
        if microbatch.entering:
            microbatch.entering = False
            self._held.add((microbatch.stage, microbatch.index))

    def _doing(self, microbatch: Microbatch) -> tuple[str, int]:
        """The kind of action that the microbatch is at, and the stage."""
        later = microbatch.phase == "B" and (microbatch.stage, microbatch.index) in self.order.later
        return "I" if later else microbatch.phase, microbatch.stage

    def _end_slice(self, microbatch: Microbatch) -> None:
        kind, stage = self._slice
        self._span(kind, microbatch.index, self._slice_start, stage)

    def _span(self, kind: str, microbatch: int, start_s: float, stage: int) -> None:
        """A span of work that ends now."""
        end_s = self._record(kind, microbatch, start_s, stage=stage)
        self.spans.append(Span(self.rank, kind, microbatch, start_s, end_s, stage))

    def _record(self, kind: str, microbatch: int, start_s: float, peer: int = -1, stage: int = -1) -> float:
        """A span that ends now; when that is."""
        end_s = time.perf_counter()
        if self.hooks.record is not None:
            self.hooks.record(kind, microbatch, start_s, end_s, peer, stage)
        return end_s

    def pause(self, microbatch: Microbatch) -> None:
        """Give the turn away; returns when it comes back. Called on the microbatch's own thread."""
        if microbatch.cancelled:
            return
        if microbatch.entering:
            self._held.discard((microbatch.stage, microbatch.index))
        chosen = self._next()
        if chosen is microbatch and self._doing(microbatch) == self._slice:
            self._enter(microbatch)
            return
        self._end_slice(microbatch)
        if chosen is microbatch:
            self._begin_slice(microbatch)
            return
        self._pass_on(chosen)
        assert microbatch.worker is not None
        microbatch.worker.turn.acquire()

    def _next(self) -> Microbatch | None:
        """The microbatch that goes on; None where the thread that runs the step has something to do."""
        if self._interrupted or self.mailbox.failure is not None:
            return None
        try:
            chosen = self._choose()
        except DivergenceError:  # raised again by the thread that runs the step
            return None
        if not isinstance(chosen, Microbatch):
            return None
        self._settle(chosen)
        return chosen

    def _pass_on(self, chosen: Microbatch | None) -> None:
        """Give the turn to a microbatch, or back."""
        self.hooks.leave()
        if chosen is None:
            self._given = True
            self._back.release()
        else:
            self._resume(chosen)

    def finished(self, microbatch: Microbatch) -> None:
        """The body has returned or raised; called on its thread as the last thing it does."""
        if not microbatch.cancelled:
            self._end_slice(microbatch)
        self._active.remove(microbatch)
        self._held -= {
            place for place in self._held if place[1] == microbatch.index and place not in self._tasks
        }
        own = [what for _, what in self._before_forward if what[2] == microbatch.index]
        self._has_run(*(what for what in own if what[1:] not in self._tasks))
        microbatch.kept = None
        assert microbatch.worker is not None
        self._idle.append(microbatch.worker)
        self._pass_on(None if microbatch.cancelled or microbatch.error is not None else self._next())

    def _sleep(self, seen: int) -> None:
        if self.mailbox.failure is not None:
            raise self.mailbox.failure
        waits = next((m for m in self._active if m.waiting is not None), None)
        if waits is not None and waits.waiting is not None:
            self.hooks.note("wait", waits.index, waits.waiting[0])
        self._checks.before_wait()
        before = time.perf_counter()
        while self.mailbox.wait(seen, POLL_S) == seen:
            self._checks.while_waiting(time.perf_counter() - before)
            if time.perf_counter() - before > self.wait_timeout_s:
                raise StallError(self._stall_text())
        if waits is not None and waits.waiting is not None:
            self._record("wait", waits.index, before, waits.waiting[0])
        if self.mailbox.failure is not None:
            raise self.mailbox.failure

    def _stall_text(self) -> str:
        waits = "; ".join(
            f"microbatch {m.index} for {m.waiting[1]} from "
            + (f"pipeline rank {m.waiting[0]}" if m.waiting[0] >= 0 else f"replica {-1 - m.waiting[0]}")
            + (f" ({m.what})" if m.what else "")
            for m in self._active
            if m.waiting is not None
        )
        if not waits and self.turns is not None:
            waits = "for the turn that the first rank of its tensor-parallel group gives"
        return (
            f"nothing arrived for {self.wait_timeout_s:g} s on pipeline rank {self.rank}, which waits: {waits}. "
            'If a rank may take this long between two steps, raise "wait_timeout" (seconds).'
        )

    def _unwind(self) -> None:
        """End microbatches that are still in flight: their ``finally`` blocks run, nothing else does."""
        for microbatch in list(self._active):
            microbatch.cancelled = True
            assert microbatch.worker is not None
            microbatch.worker.go()
            self._back.acquire()
        self._waiting = []
        self._tasks = {}

    def _new_worker(self) -> Worker:
        worker = Worker(len(self._workers))
        self._workers.append(worker)
        return worker

    def cpu_s(self) -> float:
        """Processor time of the threads that have run microbatches, and of the one that calls this."""
        return time.thread_time() + sum(worker.cpu_s() for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers, self._idle = [], []
