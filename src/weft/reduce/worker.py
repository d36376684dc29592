"""One thread that does a collective's steps in order, so that a sum on CPU tensors goes on beside the backward pass.

Whoever waits for a step that has not begun does it itself: small sums that are waited for at once cost no switch of
threads. Work on a GPU is only queued, on a stream of its own, and needs no thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

from weft.errors import UsageError


class Job:
    """A step that is done, or will be, by the worker or by who waits for it."""

    def __init__(self, worker: Worker, step: Callable[[], None]) -> None:
        self._worker = worker
        self._step: Callable[[], None] | None = step
        self.done = threading.Event()
        self.error: BaseException | None = None

    def run(self, failed: BaseException | None) -> BaseException | None:
        """Do the step unless an earlier one failed; what it raised."""
        step, self._step = self._step, None
        assert step is not None
        try:
            self.error = failed
            if failed is None:
                with torch.no_grad():
                    step()
        except BaseException as error:  # handed to whoever waits
            self.error = error
        self.done.set()
        return self.error

    def wait(self) -> None:
        """Return when the step is done; raise what it raised, or what an earlier step did."""
        self._worker.advance(self)
        self.done.wait()
        if self.error is not None:
            raise self.error


class Queued:
    """A step on a GPU: its kernels are in a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait for the step."""
        self._event.wait()


class Worker:
    """Does steps one after the other, in the order in which they were given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: deque[Job] = deque()
        self._turn = threading.Lock()
        self._news: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        self._closed = False

    def submit(self, step: Callable[[], None], flat: torch.Tensor) -> Job | Queued:
        """Start a step that works on ``flat``, and return it; ``UsageError`` after ``close``."""
        self._check_open()
        return self._queue(step, flat) if flat.is_cuda else self.start(step)

    def start(self, step: Callable[[], None]) -> Job:
        """Start a step on the thread, wherever its tensors are; see :meth:`submit`."""
        self._check_open()
        job = Job(self, step)
        self._pending.append(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._news.put(True)
        return job

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this collective was closed: make a new one")

    def _queue(self, step: Callable[[], None], flat: torch.Tensor) -> Queued:
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            step()
            flat.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record()
        return Queued(event)

    def advance(self, job: Job) -> None:
        """Do what is pending up to ``job``, unless the thread is at it."""
        if self._turn.acquire(blocking=False):
            try:
                while not job.done.is_set() and self._pending:
                    self._next()
            finally:
                self._turn.release()

    def _next(self) -> None:
        self._failed = self._pending.popleft().run(self._failed)

    def _loop(self) -> None:
        while self._news.get():
            with self._turn:
                while self._pending:
                    self._next()

    def close(self) -> None:
        """End the thread when everything that was given is done."""
        self._closed = True
        if self._thread is not None:
            self._news.put(False)
            self._thread.join()
            self._thread = None
