"""Starts the ranks of a job, watches them, and ends them all as soon as one fails.

start     one process a rank, here (`running.local_ranks`) or on other hosts (`remote.ssh_hosts`)
watch     their output, their ends and their signs, in one loop of one thread
fail      a rank ended abnormally or was judged: wait a moment for what others report, end all, say why
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.analysis.run import Failed as FailedJob
from weft.launch.environ import attempt_environ, free_port, rank_environ
from weft.launch.output import Lines, Streams
from weft.launch.remote.ssh_hosts import Elsewhere
from weft.launch.root_cause import (
    Blame,
    End,
    blame,
    blame_by,
    is_failure,
    only_victims,
    signal_name,
    split_stacks,
    standing,
    victims_text,
)
from weft.launch.running.job import Failed, Job, usable_cores
from weft.launch.running.local_ranks import Here
from weft.terminal_text import LINES, visible
from weft.watch import before_init, failed
from weft.watch.board import read_reports
from weft.watch.failure import Failure
from weft.watch.files.blocked_ranks import BlockedRanks
from weft.watch.files.operation import Outside
from weft.watch.heartbeat import Page, Sign, State
from weft.watch.judge import Judge, Verdict
from weft.watch.process import stack_signal
from weft.watch.progress_file import step_of

TICK_SECONDS = 0.05
SETTLE_SECONDS = 0.3
"""How long the launcher waits, after the first failure, for what other ranks report."""
LATE_SECONDS = 1.5
"""The same as long as the rank to blame has not ended, or is not known."""
STACKS_SECONDS = 0.5
FAILURE_GRACE_SECONDS = 1.5
STOP_GRACE_SECONDS = 5.0
DRAIN_SECONDS = 1.0
STOPPED_OUTPUT_SECONDS = 1.0
"""Seconds for which a launcher that was asked to end waits for the reader of its output."""
OUTPUT_LOST = os.EX_IOERR
"""The exit code of a job that ended well but could not write its output."""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAVING = (signal.SIGTERM, signal.SIGUSR1)
"""At these a script that uses `weft.checkpoints` saves and ends by itself."""
GO_ON = os.EX_TEMPFAIL
"""Its exit code then."""


def heeded() -> list[signal.Signals]:
    """The signals that end a job; one that is ignored (`nohup`, a shell's `&`) stays ignored."""
    return [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


class Launcher:
    """One running job. All of it happens in the main thread.

    ``failed`` is how the job failed, once it did.
    """

    def __init__(self, job: Job) -> None:
        self.failed: Failed | None = None
        self._job = job
        self._page, self._shared = Page.create(job.ranks)
        self._judge = Judge()
        self._outside, self._blocked = Outside(self._page), BlockedRanks()
        self._ends: dict[int, End] = {}
        self._ordered = False
        self._stopped_by: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._lines: dict[tuple[int, bool], Lines] = {}
        self._taken = 0
        self._moves = dict.fromkeys(range(job.ranks), 0)
        self._journal = job.journal
        self._stacks: dict[int, bytes] | None = None
        self._shown = Streams(1, 2)
        self._own = attempt_environ(job.attempt, job.restarts)
        self._held: socket.socket | None = None
        self._ranks: Here | Elsewhere
        if job.hosts:
            self._ranks = Elsewhere(job, self._page, self._own, self._selector, self._take, self._say)
        else:
            self._ranks = Here(job.command, self._shared, self._selector, self._take)
            self._held, master = free_port()
            self._own |= master

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()
        self._selector.close()
        os.close(self._shared)
        if self._held is not None:
            self._held.close()

    def run(self) -> int:
        with self._signals():
            try:
                self._journal.begin(self._job.attempt, self._job.ranks)
                self._start()
                if self._job.attend is not None:
                    self._job.attend(self._page)
                code = self._watch()
                self._bring()
                return code
            except BrokenPipeError:  # nobody reads the output any more
                return 128 + signal.SIGPIPE

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals that end the job are kept in a list; the end of a child wakes the loop up."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        self._selector.register(reading, selectors.EVENT_READ, lambda: reading.recv(4096))
        self._wakeup = reading
        before = {number: signal.signal(number, self._on_signal) for number in heeded()}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.unregister(reading)
            reading.close()
            writing.close()

    def _on_signal(self, number: int, _: object) -> None:
        self._stopped_by.append(number)

    def _start(self) -> None:
        """All ranks; on other hosts they may not be there yet when a host is lost, or the launcher asked to stop."""
        ranks = range(self._job.ranks)
        for rank in ranks:
            number = self._job.shown(rank)
            shown = self._job.prefix == "all" or (self._job.prefix == "others" and number != 0)
            prefix = f"[rank {number}] ".encode() if shown else b""
            for is_error in (False, True):
                self._lines[rank, is_error] = self._show(is_error, prefix, live=number == 0 and not shown)
        if isinstance(self._ranks, Here):
            for rank in ranks:
                environ = rank_environ(self._job.environ, rank, self._job.ranks, usable_cores())
                self._ranks.start(rank, {**environ, **self._own}, typed=rank == 0 and not os.isatty(0))
        while not (self._ranks.ready or self._ranks.lost or self._stopped_by):
            self._turn()
        places = {rank: {"pid": self._ranks.pid(rank), "host": self._ranks.host(rank)} for rank in ranks}
        self._journal.note("started", ranks=places)

    def _say(self, line: bytes) -> None:
        """Shows a line that is no rank's: an ssh says it of itself."""
        self._shown.err.write(self, line)

    def _show(self, is_error: bool, prefix: bytes, live: bool) -> Lines:
        sink, writer = self._shown.err if is_error else self._shown.out, object()
        return Lines(lambda data: sink.write(writer, data), prefix, live)

    def _take(self, rank: int, is_error: bool, data: bytes) -> None:
        """Takes a rank's output; empty data is its end."""
        self._taken += 1
        self._journal.take(rank, data)
        if is_error and self._stacks is not None:
            self._stacks[rank] = self._stacks.get(rank, b"") + data
            return
        lines = self._lines[rank, is_error]
        lines.feed(data)
        if not data:
            lines.close()

    def _watch(self) -> int:
        """Until all ranks ended well, one did not, or the launcher is asked to stop."""
        while len(self._ends) < self._job.ranks:
            self._turn()
            self._journal.reach(step_of(self._page, 0))
            self._look_at_files()
            if self._stopped_by and not self._lets_save():
                return self._stop()
            if self._ranks.lost is not None:
                return self._fail(self._ranks.lost)
            if any(is_failure(end, self._page.sign(end.rank)) for end in self._ends.values()):
                return self._fail(None)
            if self._shown.full:
                continue  # ranks that wait for the reader of their output are not to blame
            verdict = self._judge.observe(time.monotonic(), self._living_signs())
            if verdict is not None:
                return self._fail(self._ranks.instead(verdict))
        self._drain()
        self._hand_over(None)
        if any(end.code == GO_ON for end in self._ends.values()):
            return GO_ON
        if self._stopped_by and not self._page.course.asked:
            return 128 + self._stopped_by[0]
        if self._journal.lost:
            text = f"weft: --log-dir cannot be written to: {self._journal.lost}. Some of it is missing\n"
            self._shown.err.write(self, text.encode(errors="replace"))
        return OUTPUT_LOST if self._shown.lost or self._journal.lost else 0

    def _look_at_files(self) -> None:
        """Reports ranks that are blocked in an operation on a file, and those that wait for them."""
        if isinstance(self._ranks, Here):
            self._ranks.look_at_files(self._outside)
        text = self._blocked.observe(
            {rank: self._page.sign(rank) for rank in range(self._job.ranks) if rank not in self._ends}
        )
        if text:
            lines = "".join(f"weft: {line}\n" for line in text.splitlines())
            self._shown.err.write(self, lines.encode(errors="replace"))
        self._journal.stand(self._blocked)

    def _bring(self) -> None:
        """Recordings of ranks on other hosts, unless the job starts again; until they are here, or a further signal."""
        if isinstance(self._ranks, Here) or (
            self.failed is not None and self._job.attempt < self._job.restarts
        ):
            return
        heard = len(self._stopped_by)
        self._ranks.bring()
        while self._ranks.brings and len(self._stopped_by) == heard:
            self._turn()
        self._hand_over(STOPPED_OUTPUT_SECONDS)

    def _lets_save(self) -> bool:
        """True if the ranks save and end by themselves, as they were asked to; one signal asks, the second one ends."""
        course = self._page.course
        if len(self._stopped_by) > 1 or self._stopped_by[0] not in SAVING or not course.heeded:
            return False
        if not course.asked:
            course.asked = 1
            name = signal_name(self._stopped_by[0])
            self._journal.note("saving", signal=name)
            if self._job.replica is None:
                text = f"weft: {name}: the job saves after a step and ends; a second signal ends it at once\n"
                self._shown.err.write(self, text.encode())
        return True

    def _living_signs(self) -> dict[int, Sign]:
        """The signs of life of the ranks, or what is seen of them where they show nothing.

        A process that ended is judged by its end, not by its silence. One that ended well and was never watched has
        left those that wait for it.
        """
        signs = self._page.signs()
        for rank in range(self._job.ranks):
            watched = signs[rank].state in (State.RUNNING, State.FINISHING)
            if rank not in self._ends:
                signs[rank] = signs[rank] if watched else self._seen(rank, signs[rank])
            elif signs[rank].state is State.ABSENT:
                signs[rank] = Sign(State.FINISHING, self._ranks.pid(rank), host=self._ranks.host(rank))
            else:
                del signs[rank]
        return signs

    def _seen(self, rank: int, sign: Sign) -> Sign:
        """The sign of a process that weft does not watch: it beats as long as it is not stopped."""
        self._moves[rank] += not self._ranks.is_stopped(rank)
        limits = self._job.limits
        phase = before_init.BEFORE if sign.state is State.ABSENT else before_init.AFTER
        return Sign(
            State.RUNNING, self._ranks.pid(rank), self._moves[rank], sign.heartbeat or limits.heartbeat, limits.start,
            phase=phase, host=self._ranks.host(rank), operation=sign.operation, operation_s=sign.operation_s,
        )  # fmt: skip

    def _turn(self, seconds: float = TICK_SECONDS) -> None:
        """Shows output and notices ends for a moment."""
        full, taken = self._shown.full, self._taken
        if full:
            self._shown.wait(seconds, self._wakeup)
        else:
            for key, _ in self._selector.select(seconds):
                key.data()
            for lines in self._lines.values() if taken == self._taken else ():
                lines.flush()
        self._shown.push()
        self._ranks.exchange(listening=not full)
        for rank, code in self._ranks.ends():
            self._journal.note("rank ended", rank=rank, code=code)
            ordered = self._ordered or (code == GO_ON and bool(self._page.course.asked))
            self._ends[rank] = End(
                rank, self._ranks.pid(rank), code, time.monotonic(), ordered, self._ranks.host(rank)
            )

    def _hand_over(self, seconds: float | None) -> None:
        """Until the reader has taken all output, a further signal, or for so many seconds."""
        heard = len(self._stopped_by)
        deadline = time.monotonic() + (seconds if seconds is not None else float("inf"))
        while self._shown.waiting and len(self._stopped_by) == heard and time.monotonic() < deadline:
            self._shown.wait(TICK_SECONDS, self._wakeup)

    def _turn_until(self, deadline: float, heard: int | None = None) -> None:
        """Until the deadline, the end of all, or a signal to stop beyond the first `heard` (those so far)."""
        if heard is None:
            heard = len(self._stopped_by)
        while (
            (left := deadline - time.monotonic()) > 0
            and len(self._ends) < self._job.ranks
            and len(self._stopped_by) <= heard
        ):
            self._turn(min(left, TICK_SECONDS))

    def _fail(self, verdict: Verdict | None) -> int:
        """Finds out who is to blame, says so, and ends the rest."""
        self._page.end()
        self._settle(verdict)
        verdict = verdict or self._ranks.lost
        failures = read_reports(self._page)
        ends = list(self._ends.values())
        stacks = self._ask_for_stacks() if verdict is not None and verdict.kind != "lost" else {}
        found = blame_by(verdict, ends) if verdict else blame(ends, failures, self._page.signs())
        assert found is not None
        if verdict is not None and verdict.kind in ("left", "stalled"):
            gone = verdict.ranks if verdict.kind == "left" else ()
            waiting = {rank: text for rank, text in stacks.items() if rank not in gone}
            found = replace(found, details=standing(waiting, failures))
        self._note_failure(found, failures)
        self._drain()
        others = victims_text(failures, found.rank)
        self._report(found, others)
        step = self._page.loop_step(found.rank) or self._page.sign(found.rank).step
        if self._job.recording:
            failed.leave(Path(self._job.recording), FailedJob(found.headline, found.rank, max(0, step or 0)))
        said = {each.rank: f"{each.headline()}\n{each.details()}" for each in failures}
        for rank, text in ({found.rank: found.headline} | said).items():
            self._journal.take(rank, f"weft: {text}\n".encode(errors="replace"))
        stacks = {} if verdict is not None and verdict.kind == "left" else stacks
        self._show_stacks(stacks)
        self._journal.fail(
            {
                "rank": found.rank, "host": self._ranks.host(found.rank), "headline": found.headline,
                "details": found.details, "others": others, "code": found.code,
                "step": step, "kind": verdict.kind if verdict is not None else "ended", "stacks": stacks,
            }
        )  # fmt: skip
        if verdict is not None and verdict.kind == "frozen":
            self._signal(verdict.ranks, signal.SIGKILL)  # it would not hear anything less
        self._end_all(FAILURE_GRACE_SECONDS)
        self._hand_over(None)
        return found.code

    @property
    def gone(self) -> Sequence[str]:
        """The hosts that could not be reached, or not any more."""
        return self._ranks.gone

    def _note_failure(self, found: Blame, failures: Sequence[Failure]) -> None:
        """Keeps the failure, for a restart; a job that was asked to end is not started again."""
        if self._stopped_by:
            return
        sign, course = self._page.sign(found.rank), self._page.course
        said = [f"{each.kind}: {each.text}" for each in failures if each.rank == found.rank]
        step = None if sign.state is State.ABSENT else self._page.loop_step(found.rank) or sign.step or 0
        self.failed = Failed(found.headline, "".join(said), step, course.saves, found.code)

    def _settle(self, verdict: Verdict | None) -> None:
        """Waits for what other ranks report, and for the end of a rank that left: its exit code counts."""
        deadline = time.monotonic() + LATE_SECONDS
        while True:
            self._turn_until(time.monotonic() + SETTLE_SECONDS)
            if verdict is not None:
                late = verdict.kind == "left" and verdict.ranks[0] not in self._ends
            else:
                late = only_victims(list(self._ends.values()), read_reports(self._page), self._page.signs())
            if not late or time.monotonic() > deadline or len(self._ends) == self._job.ranks:
                return

    def _report(self, found: Blame, victims: str) -> None:
        whose = "" if self._job.replica is None else f"replica {self._job.replica}: "
        parts = [f"weft: {whose}{found.headline}", found.details, victims]
        text = "\n".join(part for part in parts if part)
        self._shown.err.write(self, f"{text}\n".encode(errors="replace"))

    def _ask_for_stacks(self) -> dict[int, str]:
        """The stacks of the threads of all ranks that still answer; what else these write comes before the report."""
        found = self._stacks = {}
        for rank, sign in self._page.signs().items():
            if sign.state is not State.ABSENT and rank not in self._ends:
                self._ranks.send(rank, stack_signal(), alone=True)
        self._turn_until(time.monotonic() + STACKS_SECONDS)
        self._stacks = None
        shown = {}
        for rank, output in found.items():
            own, stacks = split_stacks(output)
            self._lines[rank, True].feed(own)
            if stacks:
                shown[rank] = visible(stacks.decode(errors="replace"), LINES)
        return shown

    def _show_stacks(self, stacks: Mapping[int, str]) -> None:
        if stacks:
            self._shown.err.write(self, b"weft: stacks of the ranks that answer:\n")
        for rank, text in stacks.items():
            self._lines[rank, True].feed(text.encode(errors="replace"))

    def _stop(self) -> int:
        """Somebody ended the launcher; a second time means at once."""
        number = self._stopped_by[0]
        self._journal.note("stopping", signal=signal_name(number))
        text = f"weft: {signal_name(number)}: ending {self._job.ranks - len(self._ends)} ranks\n"
        with contextlib.suppress(BrokenPipeError):
            if self._job.replica is None:
                self._shown.err.write(self, text.encode())
        self._end_all(STOP_GRACE_SECONDS, heard=1)
        self._hand_over(STOPPED_OUTPUT_SECONDS)
        return 128 + number

    def _end_all(self, grace: float, heard: int | None = None) -> None:
        """Asks all ranks to end, and kills those that did not after `grace` seconds, or at a further signal."""
        self._ordered = True
        self._page.end()
        self._signal(range(self._job.ranks), signal.SIGTERM)
        self._turn_until(time.monotonic() + grace, heard)
        self._signal(range(self._job.ranks), signal.SIGKILL)
        self._turn_until(time.monotonic() + 1.0)
        self._drain()

    def _signal(self, ranks: Iterable[int], number: int) -> None:
        for rank in ranks:
            self._ranks.send(rank, number)

    def _drain(self) -> None:
        """Reads what the ranks that ended wrote; a pipe that a grandchild keeps open, or fills, is not waited for."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while (ready := self._selector.select(0)) and time.monotonic() < deadline and not self._shown.full:
            for key, _ in ready:
                key.data()
        for lines in self._lines.values():
            lines.close()
