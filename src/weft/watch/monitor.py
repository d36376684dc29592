"""One rank under watch: it shows what it does, and no failure of it, or of another rank, goes unheard.

start    its process ends with its launcher; a thread beats; uncaught exceptions are reported
note     what it does now: half a microsecond, so the executor calls it for each action
fail     what went wrong, written down before the process ends
finish   waits for the others at a normal end, so that nobody leaves while somebody still needs it
leave    the last step: nothing is shared any more
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

from weft.analysis.run import Failed
from weft.watch import failed, statement
from weft.watch.before_init import leave_interrupts
from weft.watch.before_init import report as report_early
from weft.watch.board import Board, Launched, Stored
from weft.watch.failure import Failure, chain, root_cause
from weft.watch.files.blocked_ranks import BlockedRanks
from weft.watch.files.operation import Look
from weft.watch.heartbeat import Page, Sign, State
from weft.watch.judge import RETURN_SECONDS, Handler, Verdict
from weft.watch.process import answer_with_stacks, die_with_parent, exit_now, handled_in
from weft.watch.progress_file import Pace
from weft.watch.sidecar.start import Beside

_POLL_SECONDS = 0.005
_LAST_SECONDS = 2.0
"""How long rank 0, which holds the store, waits for the others to leave."""


class _Place(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def launched(self) -> bool: ...
    @property
    def shared_fd(self) -> int | None: ...


@dataclass(frozen=True)
class Limits:
    """After how many seconds a rank counts as frozen, and a job in which a rank waits counts as stalled."""

    heartbeat: float = 30.0
    stall: float = 600.0

    @property
    def start(self) -> float:
        """Seconds after which a job counts as stalled whose ranks have not all come: they may import much first."""
        return max(self.stall, 300.0)

    @property
    def interval(self) -> float:
        """Seconds between two beats."""
        return min(0.5, self.heartbeat / 6)


class Monitor:
    """See the module. `note` is the slot's own method: calls of it go straight there."""

    def __init__(self, place: _Place, limits: Limits, board: Board) -> None:
        self._place = place
        self._limits = limits
        self._board = board
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._previous_hook: Callable[..., Any] = sys.excepthook
        self._process = os.getpid()
        self._judged = False
        self._handler, self._handling = Handler(place.rank), False
        self._pace = Pace()
        self._look, self._blocked = Look(os.getpid()), BlockedRanks()
        self._store: Any = None
        self.recording: Path | None = None
        """The folder of the recording, if there is one: `weft top` reads there what ranks stand in."""
        self.beside: Beside | None = None
        """The process beside this one, in a job over several hosts."""
        self.note: Callable[..., None] = board.slot.note
        self.measure: Callable[[float, int], None] = board.slot.measure
        self.reach: Callable[[int], None] = board.slot.reach
        self.course = board.course

    @classmethod
    def start(cls, place: _Place, limits: Limits, store: Any | None = None) -> Monitor:
        """Puts this process under watch.

        Args:
            place: Its rank, the number of ranks, and what its launcher shares with it.
            limits: When a rank counts as frozen or stalled.
            store: The job's store, through which the ranks watch each other where no `weft run` does.
        """
        if place.shared_fd is not None:
            board: Board = Launched(Page.attach(place.shared_fd), place.rank)
            _let_others_finish(board)
        elif store is not None and place.world_size > 1:
            board = Stored(store.clone(), place.rank, place.world_size, limits.interval)
        else:
            board = Launched(Page.private(1), 0, reports_itself=True)
        monitor = cls(place, limits, board)
        monitor.hold(store)
        board.slot.open(limits.heartbeat, limits.stall)
        if place.shared_fd is not None or place.world_size > 1:
            monitor._attach()
        return monitor

    def hold(self, store: Any) -> None:
        """Keeps the store: on rank 0 it ends with its last reference."""
        self._store = store

    def _attach(self) -> None:
        if self._place.launched:
            die_with_parent()
        answer_with_stacks()
        sys.excepthook = self._on_exception
        leave_interrupts()
        os.register_at_fork(after_in_child=self._forget)
        self._thread = threading.Thread(target=self._beat, name="weft-monitor", daemon=True)
        self._thread.start()

    def _forget(self) -> None:
        """A forked child is no rank: it must not write into the page that it inherited."""
        self.note = self.measure = lambda *args, **kwargs: None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook

    def _beat(self) -> None:
        while True:
            try:
                verdict = self._board.beat()
            except RuntimeError:
                verdict = self._store_lost()
            if verdict is not None:
                self._end(verdict)
            self._look_at_handler()
            self._look_at_files()
            if self.beside is not None and self._board.somebody_left:
                self.beside.note_leaving()
            self._report_step()
            if self._stop.wait(self._limits.interval):
                return

    def _look_at_handler(self) -> None:
        """End the job with the exception that the main thread handles, if it waits there for what nobody else does."""
        error = handled_in(threading.main_thread())
        if error is None and not self._handling:
            return
        self._handling = error is not None
        if self._handler.observe(time.monotonic(), error, self._board.everybody() if self._handling else {}):
            assert error is not None
            self.end_with(error)

    def _look_at_files(self) -> None:
        """Show the operation on a file in which this rank stands; rank 0 reports all ranks where nobody else does."""
        board = self._board
        board.slot.stand(*self._look.observe(board.sign().notes))
        if self._place.rank != 0:
            return
        text = self._blocked.observe(self.signs() | {0: board.sign()})
        if board.reports_itself:
            statement.stand(self._blocked)
            if text:
                _say(f"weft: {text}".replace("\n", "\nweft: "))
        if self.recording is not None:
            self._blocked.write(self.recording)

    def _report_step(self, last: bool = False) -> None:
        """Rank 0 says how far the job is, where no launcher of weft's sees that."""
        if self._place.rank == 0 and self._board.reports_itself:
            statement.reach(self._pace, self._board.step, last)

    def _store_lost(self) -> Verdict | None:
        """Rank 0 holds the store. The main thread most likely notices too, and knows more: it goes first."""
        if self._stop.wait(1.0) or not isinstance(self._board, Stored):
            return None
        return self._board.lost()

    def _end(self, verdict: Verdict) -> NoReturn:
        """Ends this process, and with it the job, because of another rank."""
        board = self._board
        assert isinstance(board, Stored)
        self._judged = True
        statement.about(self._place.rank, verdict)
        first = verdict.kind != "ended" and board.claim_ending()
        if first and self.recording is not None and verdict.ranks:
            failed.leave(self.recording, Failed(verdict.text, verdict.ranks[0], board.sign().step or 0))
        # Launchers mix the ranks' lines as they like: the cause stands first wherever it is known.
        cause = f"weft: {verdict.text}\n" if verdict.text else ""
        _say(f"{cause}rank {self._place.rank} ends because of that; its stacks:")
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        if first:
            self._kill_frozen(board, verdict)
            time.sleep(3 * self._limits.interval)
        exit_now(1)

    def _kill_frozen(self, board: Stored, verdict: Verdict) -> None:
        """A stopped process would survive the polite signal with which other launchers end a job."""
        for rank in verdict.ranks if verdict.kind == "frozen" else ():
            if board.local(rank):
                with suppress(OSError):
                    os.kill(board.signs()[rank].pid, signal.SIGKILL)

    def locate(self, error: BaseException) -> None:
        """Remembers, with the exception, what this rank does now; the innermost call counts."""
        if not hasattr(error, "_weft_sign"):
            with suppress(AttributeError):
                error._weft_sign = self._board.sign()  # type: ignore[attr-defined]

    def fail(self, error: BaseException) -> Failure:
        """Writes down how this rank failed, for the launcher and the other ranks."""
        signs = [found._weft_sign for found in chain(error) if hasattr(found, "_weft_sign")]
        sign: Sign = signs[-1] if signs else self._board.sign()
        failure = Failure.of(error, self._place.rank, sign)
        if self._board.reports_itself:
            statement.own(failure)
            if self.recording is not None and not failure.victim:
                failed.leave(self.recording, Failed(failure.headline(), failure.rank, sign.step or 0))
        self._report_step(last=True)
        with suppress(RuntimeError):
            self._board.report(failure)
        return failure

    def count_evaluations(self, count: int, now: bool) -> None:
        """Notes the number of steps so far that had no backward pass, and if the present one has none."""
        self._board.slot.count_evaluations(count, now)

    def signs(self) -> dict[int, Sign]:
        """The signs of the ranks, as far as this one sees them."""
        with suppress(RuntimeError):
            return self._board.signs()
        return {}

    def first_failure(self) -> Failure | None:
        """The failure to blame, as far as any rank wrote one down."""
        return root_cause(self._board.failures())

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._process or hasattr(sys, "ps1") or self._stop.is_set():
            self._previous_hook(kind, error, trace)
            return
        if issubclass(kind, KeyboardInterrupt):
            if self._board.reports_itself:  # who is interrupted alone would be gone without a word
                _within(1.0, lambda: self.fail(error))
            exit_now(128 + signal.SIGINT)
        if self._judged:
            time.sleep(_LAST_SECONDS)  # what broke here is a consequence; the judging thread ends the process
            exit_now(1)
        failure = self.fail(error)
        if self._previous_hook not in (sys.__excepthook__, report_early):
            self._previous_hook(kind, error, trace)
        elif self._board.reports_itself:
            report = self._own_report(failure)
            _say(report)
            if failure.victim and isinstance(self._board, Stored) and self._place.rank == 0:
                first = report.splitlines()[0].removeprefix("weft: ")
                self._board.blame("" if first.startswith("rank 0 ends") else first)
                time.sleep(3 * self._limits.interval)  # the others look for the cause in its store
        exit_now(1)

    def end_with(self, error: BaseException) -> None:
        """Ends this process, and with it the job, as an exception that the script did not catch; for what fails after
        the script's end, where Python would only write it down."""
        self._on_exception(type(error), error, error.__traceback__)

    def _own_report(self, failure: Failure) -> str:
        if not failure.victim:
            return f"weft: {failure.headline()}\n{failure.details()}"
        ends = f"rank {failure.rank} ends as it lost its connection"
        board = self._board if isinstance(self._board, Stored) else None
        for _ in range(10):  # the cause takes a moment to be seen
            cause = self.first_failure()
            if cause is not None and not cause.victim:
                return f"weft: {cause.headline()}\n{ends} to rank {cause.rank}"
            if board is not None and board.blamed:
                return f"weft: {board.blamed}\n{ends} to another rank"
            gone = board.gone() if board is not None and self._place.rank == 0 else None
            if gone is not None:
                statement.about(self._place.rank, gone)
                return f"weft: {gone.text}\n{ends} to another rank"
            time.sleep(0.05)
        # Rank 0 may have ended because of another one: so it is blamed last.
        lost = (board.culprit() or board.lost_peer(failure)) if board is not None else None
        if lost is not None:
            statement.about(self._place.rank, lost)
            return f"weft: {lost.text}\n{ends} to rank {lost.ranks[0]}"
        return f"weft: {ends} to another rank: {failure.text.partition('. ')[0]}"

    def finish(self) -> bool:
        """Waits until all ranks came to their end; False if somebody did not, and the job is ended.

        A rank that still does something else is waited for as long as it gets on, and for `stall`
        seconds if nothing is heard of it.
        """
        if self._thread is None:
            return True
        try:
            came = self._wait_for_all()
            if came and self.beside is not None:
                self.beside.dismiss()
            return came
        except RuntimeError:  # the store went away, so rank 0 did
            return False

    def _wait_for_all(self) -> bool:
        self._board.enter(State.FINISHING)
        progress: list[int] = []
        since = time.monotonic()
        while not self._board.all_finishing():
            if self._board.ending:
                return False
            now = [sign.notes for sign in self._board.signs().values()]
            if now != progress:
                progress, since = now, time.monotonic()
            if time.monotonic() - since > self._limits.stall:
                _say(f"weft: rank {self._place.rank} ends without waiting any longer for the others")
                return True
            time.sleep(_POLL_SECONDS)
        return True

    def leave(self) -> None:
        """Ends the watch. Rank 0, which holds the store, leaves last."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(1.0)
        self._thread = None
        if self.beside is not None:
            self.beside.dismiss()
        self._report_step(last=True)
        self._board.close()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        with suppress(RuntimeError):
            self._board.enter(State.FINISHED)
            deadline = time.monotonic() + _LAST_SECONDS
            while self._place.rank == 0 and time.monotonic() < deadline and not self._board.all_finished():
                time.sleep(_POLL_SECONDS)


def _let_others_finish(board: Board) -> None:
    """Where this process was in a job before: no rank may miss that all have come to its end, and wait for it again."""
    deadline = time.monotonic() + RETURN_SECONDS
    while (
        board.sign().state is State.FINISHED
        and any(sign.state is State.FINISHING for sign in board.signs().values())
        and time.monotonic() < deadline
    ):
        time.sleep(_POLL_SECONDS)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Call that, and wait no longer: a store that is frozen with rank 0 answers nothing."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _say(text: str) -> None:
    """To standard error, in one piece."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="replace"))
