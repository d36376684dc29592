"""A job whose replicas may be lost and come back: each is a job of its own, with a launcher of its own.

start    a launcher for each replica, forked from this one; it watches and judges that replica's ranks alone
lost     its launcher has ended all its ranks and said why: the others form a new generation, and it is started again
join     once all its ranks wait for the end of a step: a new generation with it
end      fewer replicas are left than the job may have, or one came to the end of its script
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from weft.launch.discovery import REPLICA
from weft.launch.guard import end_marked
from weft.launch.journal.journal import Nowhere
from weft.launch.local import GO_ON, SAVING, Launcher, heeded
from weft.launch.root_cause import exit_code, signal_name
from weft.launch.running.job import Failed, Job, usable_cores
from weft.reduce.members import Table, Word
from weft.units import format_seconds
from weft.watch import progress
from weft.watch.process import die_with_parent

_TICK_S = 0.02
_FIRST_S, _LONGEST_S = 1.0, 60.0
_MOST_SAID = 1000
"""Characters of an exception that go through the pipe, which nobody reads before the end."""


@dataclass
class _Running:
    """A replica that runs: its launcher's process, the pipe that says how it has failed, and where its ranks find the
    others. ``late``: it was ended because others waited for it."""

    pid: int
    reading: int
    address: str
    late: bool = False


class Replicas:
    """One attempt of such a job; see :class:`weft.launch.local.Launcher`, in whose place it stands.

    ``failed`` is how the job failed, once it did.
    """

    gone = ()

    def __init__(self, job: Job) -> None:
        self.failed: Failed | None = None
        self._job = job
        self._count = job.ranks // job.replica_ranks
        self._table = Table.create(self._count, job.replica_ranks)
        self._starts = [0] * self._count
        self._vain = [0] * self._count
        """The number of starts of each in a row without joining."""
        self._due_s: dict[int, float] = {}
        self._running: dict[int, _Running] = {}
        self._members: dict[int, int] = {}
        self._joined: set[int] = set()
        self._ended: set[int] = set()
        self._restarts = 0
        self._begun = False
        """True once replicas have a state."""
        self._levels: dict[int, tuple[int, int, float]] = {}
        """For each replica its start, how far it is, and when it last got further or nobody waited for it."""
        self._heard: list[int] = []
        self._code: int | None = None
        self._saved = False

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)  # its guard ends its ranks
            os.waitpid(each.pid, 0)
            os.close(each.reading)
        self._table.close()

    def run(self) -> int:
        """The exit code for the launcher."""
        with self._signals():
            for replica in range(self._count):
                self._start(replica)
            forwarded = 0
            while self._running or (self._due_s and self._code is None):
                time.sleep(_TICK_S)
                for number in self._heard[forwarded:]:
                    self._forward(number, again=forwarded > 0)
                    forwarded += 1
                self._look()
        if not (self._table.generation or self._code or self._heard):
            _say(
                "no replica has come to a step of weft, so min_replicas had no effect: each replica of "
                f"{self._job.replica_ranks} ran for itself"
            )
            return 1
        if self._saved:
            return GO_ON
        if self._heard:
            return 128 + self._heard[0]
        return self._code or 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {
            number: signal.signal(number, lambda number, _: self._heard.append(number)) for number in heeded()
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, again: bool) -> None:
        self._due_s.clear()
        saves = number in SAVING and not again
        what = "ending all replicas"
        if saves:
            what = "the job saves after a step and ends; a second signal ends it at once"
        _say(f"{signal_name(number)}: {what}")
        for each in self._running.values():
            os.kill(each.pid, number)

    # --- starting ---------------------------------------------------------------------------------------------

    def _start(self, replica: int) -> None:
        reading, writing = os.pipe()
        address = self._table.address(replica, self._starts[replica])
        self._starts[replica] += 1
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run(self._job, replica, address, writing, launcher)
        os.close(writing)
        self._running[replica] = _Running(pid, reading, address)

    def _look(self) -> None:
        """Notices replicas that have ended, starts those that are due, and takes in those that wait."""
        for replica, each in [*self._running.items()]:
            pid, status = os.waitpid(each.pid, os.WNOHANG)
            if pid:
                with open(each.reading) as pipe:
                    said = pipe.read()
                del self._running[replica]
                code = os.waitstatus_to_exitcode(status)
                if code < 0:  # it could not see to the end of its ranks: none may write any more
                    end_marked(each.address, REPLICA)
                    if not each.late:
                        _say(f"the launcher of replica {replica} was killed by {signal_name(-code)}")
                self._end(
                    replica, exit_code(code) if code else 0, Failed(**json.loads(said)) if said else None
                )
        if self._code is not None or self._heard:
            return
        now_s = time.monotonic()
        for replica in [each for each, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[replica]
            self._start(replica)
        self._note_joined()
        self._take_in()
        self._end_late(now_s)

    def _note_joined(self) -> None:
        for replica, start in self._members.items():
            if replica not in self._joined and self._table.all_have(replica, Word.JOINED, start):
                self._joined.add(replica)
                self._vain[replica] = 0
                if start > 1:
                    _say(f"replica {replica} has joined: {len(self._joined)} of {self._count}")

    def _end_late(self, now_s: float) -> None:
        """End a replica for which the others have waited as long as they may."""
        if self._table.generation:
            levels = {each: self._table.level(each) for each in self._members}
        else:
            levels = {each: int(self._is_ready(each)) for each in self._running}
        for replica, level in levels.items():
            start = self._starts[replica]
            if self._levels.get(replica, (0, 0, 0.0))[:2] != (start, level) or level == max(levels.values()):
                self._levels[replica] = start, level, now_s
        limits = self._job.limits
        limit_s = limits.stall if self._table.generation else limits.start
        late = [each for each in levels if now_s - self._levels[each][2] > limit_s]
        for replica in late:
            self._levels[replica] = self._starts[replica], levels[replica], now_s
            what = "the end of a step" if self._table.generation else "its first step"
            _say(
                f"replica {replica} has not come to {what} in {format_seconds(limit_s)}, and others wait for it"
            )
            self._running[replica].late = True
            os.kill(self._running[replica].pid, signal.SIGKILL)  # its guard ends its ranks

    def _is_ready(self, replica: int) -> bool:
        """True if all its ranks wait for the others."""
        return self._table.all_have(replica, Word.READY, self._starts[replica])

    def _take_in(self) -> None:
        ready = {
            each: self._starts[each]
            for each in self._running
            if each not in self._members and self._is_ready(each)
        }
        if not self._table.generation:
            if ready and len(ready) == len(self._running) and not self._due_s:
                self._begin(ready)
        elif ready and self._joined == self._members.keys():
            self._begin({**self._members, **ready})

    def _begin(self, members: dict[int, int]) -> None:
        self._members = members
        self._joined &= members.keys()
        self._table.begin(members, self._ended)

    # --- ends -------------------------------------------------------------------------------------------------

    def _end(self, replica: int, code: int, failed: Failed | None) -> None:
        """A replica has ended, all its ranks are gone."""
        self._note_joined()
        was_member, had_state = replica in self._members, replica in self._joined
        self._begun |= bool(self._joined)
        if code == 0:
            self._ended.add(replica)
        left = {each: start for each, start in self._members.items() if each != replica}
        if was_member:
            self._begin(left)
        if code == GO_ON:
            self._saved = True
        if self._code is not None or self._heard:
            return
        if code == 0:
            if self._table.generation and not self._joined:
                self._stop(0)  # the others have not joined, and nobody is left to give them the state
            return
        if code == GO_ON:
            return
        if self._ended:
            if had_state:
                self._fail(code, failed)
            return
        least, there = self._job.least_replicas, len(self._joined if self._begun else left)
        if not self._table.generation and failed is not None and failed.said:
            self._fail(code, failed)
        elif self._table.generation and there < least:
            _say(f"{there} of {self._count} replicas are left, fewer than min_replicas {least}")
            self._fail(code, failed)
        else:
            self._lose(replica, code, failed)

    def _lose(self, replica: int, code: int, failed: Failed | None) -> None:
        """The others go on; the lost one is started again, if it may be."""
        left = len(self._joined) if self._begun else len(self._running)
        others = f"replica {replica} is lost, {left} of {self._count} go on"
        if self._restarts >= self._job.replica_restarts:
            _say(f"{others}; all {self._restarts} restarts are used up")
            if not self._table.generation and len(self._running) < self._job.least_replicas:
                self._fail(code, failed)
            return
        self._restarts += 1
        self._vain[replica] += 1
        vain = self._vain[replica] - 1
        seconds = min(_LONGEST_S, _FIRST_S * 2.0 ** min(vain - 1, 10)) if vain else 0.0
        when = f" in {format_seconds(seconds)}" if seconds else ""
        _say(f"{others}; it is started again{when} ({self._restarts} of {self._job.replica_restarts})")
        self._due_s[replica] = time.monotonic() + seconds

    def _fail(self, code: int, failed: Failed | None) -> None:
        self.failed = failed or Failed("a replica has failed", "", None, 0, code)
        self._stop(code)

    def _stop(self, code: int) -> None:
        """End all replicas that still run."""
        self._code = code
        self._due_s.clear()
        for each in self._running.values():
            os.kill(each.pid, signal.SIGINT)


def _run(job: Job, replica: int, address: str, writing: int, launcher: int) -> NoReturn:
    """A replica's launcher, in a process of its own."""
    code = 1
    try:
        os.setpgid(0, 0)  # signals of a terminal come through the launcher of all
        die_with_parent(launcher)
        for number in {*heeded(), signal.SIGINT}:  # by which it is ended, also where nobody else may
            signal.signal(number, signal.SIG_DFL)
        environ = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // job.ranks)),
            **job.environ,
            REPLICA: address,
        }
        if replica:
            environ[progress.VARIABLE] = "off"
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        own = replace(
            job, ranks=job.replica_ranks, environ=environ, journal=Nowhere(), replica=replica, replica_ranks=0,
            restarts=0, attend=None,
        )  # fmt: skip
        with Launcher(own) as started:
            code = started.run()
        if started.failed is not None:
            failed = replace(started.failed, said=started.failed.said[:_MOST_SAID])
            os.write(writing, json.dumps(asdict(failed)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(text: str) -> None:
    print(f"weft: {text}", file=sys.stderr, flush=True)
