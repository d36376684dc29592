"""A microbatch in flight on this rank: a thread that runs only while it holds the turn.

Threads, because autocast, grad mode and the current device are kept for each thread by the framework.
The threads are few and reused: as many as microbatches were ever in flight at once on this rank.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import UsageError
from weft.transport.channel import Key, Mailbox, Message

_thread = threading.local()
END = "\0"
"""A place that a microbatch has passed when it has ended."""
BEYOND = 1 << 59
"""More often than a microbatch passes any place."""


def present() -> Microbatch | None:
    """The microbatch that runs on this thread."""
    return getattr(_thread, "microbatch", None)


class Cancelled(BaseException):
    """Unwinds a microbatch whose step has failed elsewhere; never seen by users."""


class Worker:
    """A reusable thread; ``start`` gives it a function, ``go`` the turn."""

    def __init__(self, number: int) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self._job: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name=f"weft-microbatch-{number}", daemon=True)
        self._thread.start()
        self._clock: int | None = None
        if hasattr(time, "pthread_getcpuclockid") and self._thread.ident is not None:
            self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def start(self, job: Callable[[], None]) -> None:
        self._job = job

    def _loop(self) -> None:
        while True:
            self.turn.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            job()
            del job

    def go(self) -> None:
        self.turn.release()

    def cpu_s(self) -> float:
        """Processor time that the thread has taken; 0 where the system does not say."""
        try:
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        except OSError:  # it has ended
            return 0.0

    def end(self) -> None:
        """Let the thread return; call only while it has no job."""
        self.turn.release()


class Visits:
    """The numbers of times that microbatches of one function pass places; the first one that ends sets them."""

    def __init__(self) -> None:
        self.new = True
        """False once the function's first step has ended."""
        self._known = False
        self._times: dict[str, int] = {}

    def most(self, place: str) -> int:
        """So often at most; beyond all numbers if nobody knows yet, or if it was not always the same."""
        return self._times.get(place, 0) if self._known else BEYOND

    def end(self, times: Mapping[str, int]) -> None:
        """A microbatch has ended, which has passed places so often."""
        self._known = True
        for place, number in times.items():
            self._times[place] = number if self._times.get(place, number) == number else BEYOND


class Microbatch:
    """State of one microbatch on this rank: what it does next, and what it waits for.

    ``phase`` is "F" until the backward pass begins, then "B"; ``stage`` is where it is, ``entering`` whether that still
    has to be granted, and ``worked`` whether anything was computed there. ``waiting`` is the message it waits for,
    ``follows`` the place (by name) that ``before``, the microbatch before it, must have passed as often as it will.
    ``passes`` counts the backward passes that have begun; ``latest``: as many had when it last followed; ``expected``:
    as many had at most in earlier steps, if any. ``visits``: how often microbatches pass each place; ``overtaken``:
    places that the next microbatch has passed.
    """

    def __init__(
        self, index: int, body: Callable[[Microbatch], Any], stage: int = 0, before: Microbatch | None = None
    ) -> None:
        self.index = index
        self.phase = "F"
        self.stage = stage
        self.entering = True
        self.worked = False
        self.waiting: tuple[int, Key] | None = None
        self.follows: str | None = None
        self.before = before
        self.times: dict[str, int] = {}
        self.passes = self.latest = 0
        self.expected: int | None = None
        self.visits: Visits | None = None
        self.overtaken: set[str] = set()
        self.what: str = ""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.executor: Any = None
        self.worker: Worker | None = None
        self.kept: Any = None
        self.held: Any = None
        self._body = body

    @property
    def is_new(self) -> bool:
        """True in the first step of its function."""
        return self.visits is not None and self.visits.new

    def run(self, context: contextvars.Context) -> None:
        """The body, in the context the step was called in; the executor's job on a worker thread."""
        _thread.microbatch = self
        try:
            self.result = context.run(self._body, self)
        except Cancelled:
            pass
        except BaseException as error:
            self.executor.hooks.locate(error)
            self.error = error
        self.done = True
        _thread.microbatch = None
        del self._body
        self.before = None
        self.executor.finished(self)

    def receive(self, peer: int, key: Key, what: str = "") -> Message:
        """The message ``key`` from ``peer``; others have their turn until it is there.

        Even where the message is there, that of a microbatch which the schedule puts first may have come meanwhile. Who
        waits for the first input of a stage holds nothing there yet, and enters it anew.
        """
        message = None
        while message is None:
            self.waiting, self.what = (peer, key), what
            self.entering = self.phase == "F" and not self.worked
            self._yield()
            self.waiting = None
            message = self.executor.mailbox.take(peer, key)
        return message

    def take_turns(self) -> None:
        """Let others have their turn, where ranks with other samples, in the same turns, may wait for a message."""
        turns = self.executor.turns
        if turns is not None and not turns.same_samples:
            self.entering = self.phase == "F" and not self.worked
            self._yield()

    def follow(self, place: str) -> None:
        """Wait until the microbatch before has passed ``place`` as often as microbatches do, or has begun the backward
        pass after which none came there in earlier steps. So what is kept there sees them in order."""
        self.latest = self.passes
        self.follows = place
        while not self._in_order():
            self._yield()
        self.follows = None
        self.come(place)

    def come(self, place: str) -> None:
        """It is there now, and the one before should not be there again."""
        if self.before is not None:
            self.before.overtaken.add(place)

    def follow_whole(self) -> None:
        """Wait until the microbatch before has ended: sums from here on are made in order."""
        self.follow(END)

    def let_go(self) -> None:
        """It holds nothing any more, and only waits for others."""
        self.executor.let_go(self)

    def passed(self, place: str, wrote: bool = False) -> None:
        """It has been there once more; ``wrote``: it has changed what is kept there.

        Raises:
            UsageError: The next microbatch has been there before, which in one process sees what this one wrote.
        """
        self.times[place] = self.times.get(place, 0) + 1
        if wrote and place in self.overtaken:
            raise UsageError(
                f"{place} has buffers or attributes, which microbatches change in order. A microbatch calls it "
                f"{self.times[place]} times, after {self.passes} backward passes, more often or later than in the "
                "steps before, and the next microbatch has called it already: let the first step that calls this "
                "function do it as often and as late, and keep what goes from call to call in buffers (register_buffer)"
            )

    @property
    def waits_for(self) -> str:
        """The message that it needs to go on, and where it comes from; in words."""
        if self.waiting is None:
            return "its turn"
        peer, key = self.waiting
        return f"{key} from pipeline rank {peer}"

    def ready(self, mailbox: Mailbox) -> bool:
        """True if it could run now."""
        return self._in_order() if self.waiting is None else mailbox.has(*self.waiting)

    def _in_order(self) -> bool:
        if self.follows is None or self.before is None:
            return True
        if self.follows == END:
            return self.before.done
        least = self.times.get(self.follows, 0) + 1
        if self.visits is not None:
            least = max(least, self.visits.most(self.follows))
        return self.before.over() or self.before.times.get(self.follows, 0) >= least

    def waits_before_backward(self) -> bool:
        """True if the rank does anything else between the forward and the backward pass of its stage."""
        return bool(self.executor.order.waits(self.stage, self.index))

    def next_backward(self) -> tuple[int, int] | None:
        """The (stage, microbatch) whose backward pass comes after that of its stage."""
        found: tuple[int, int] | None = self.executor.order.next_backward(self.stage, self.index)
        return found

    def over(self) -> bool:
        """True if its forward pass has ended, as far as one knows."""
        return self.done or (self.expected is not None and self.passes > self.expected)

    def enter(self, stage: int) -> None:
        """Go to another stage of this rank; whoever the schedule puts first goes on."""
        if stage != self.stage:
            self.stage = stage
            self.entering = self.phase == "F"
            self.worked = False
            self._yield()

    def completed(self, tasks: Sequence[Callable[[], None]]) -> None:
        """The backward pass of the present stage is done; ``tasks`` (weight gradients) may come later."""
        self.executor.completed(self, tasks)

    def begin(self, phase: str) -> None:
        """Enter ``phase``; whoever the schedule puts first goes on."""
        self.phase = phase
        self.passes += phase == "B"
        self._yield()

    def _yield(self) -> None:
        self.executor.pause(self)
        if self.cancelled:
            raise Cancelled
