"""Starts the contenders' processes, lets them run in turns, and checks that all compute the same gradients.

    driver --- pipe --- rank 0 of gpipe   --+
       |                                    +-- socket pair: all leave each meeting together
       +------ pipe --- rank 1 of gpipe   --+
       +------ pipe --- rank 0 of 1f1b ...

All processes live through the whole run and are stopped (SIGSTOP) while others have their turn, so drift of the
machine meets all contenders alike, and no contender's heap or threads meet another's: gloo's alone would wake some
250 times a second in every process that waits. The first steps of a turn do not count: steps of a training run follow
each other, these follow what the others left in the caches.
"""

from __future__ import annotations

import bisect
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.turns.contender import Task
from benchmarks.turns.samples import Record, Step, together

ROUNDING = 1e-5
SETTLING = 8
"""Steps of a turn that do not count: contenders become quicker until then (`benchmarks/schedules/earlier-runs.md`)."""
REPOSITORY = Path(__file__).resolve().parents[2]


class RankDied(RuntimeError):
    """A contender's process ended while the driver waited for it."""


class Job:
    """The processes of one contender."""

    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        module = type(task).__module__
        contender = sys.modules[module].CONTENDERS[name](task)
        count, self.warm_up = contender.ranks, contender.warm_up
        lines = [socket.socketpair() for _ in range(count - 1)]
        port = _free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        for rank in range(count):
            ours, theirs = Pipe()
            ends = [line[0] for line in lines] if rank == 0 else [lines[rank - 1][1]]
            meeting = [end.fileno() for end in ends]
            command = [sys.executable, "-m", "benchmarks.turns.rank", module, name, task.to_text()]
            self.processes.append(
                subprocess.Popen(
                    [*command, str(theirs.fileno()), ",".join(map(str, meeting))],
                    env=_environment(rank, count, port),
                    cwd=REPOSITORY,
                    pass_fds=[theirs.fileno(), *meeting],
                )
            )
            theirs.close()
            self.pipes.append(ours)
        for line in lines:
            for end in line:
                end.close()

    def ask(self, command: str, *arguments: object) -> list:
        """Give every rank the command, then collect every rank's reply."""
        self._signal(signal.SIGCONT)
        try:
            for pipe in self.pipes:
                pipe.send((command, arguments))
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError) as error:
            raise RankDied(f"{self.name}: a rank ended during '{command}', see its output") from error

    def rest(self) -> None:
        """Stop the processes, with all their threads, until they are asked for something."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def run(self, count: int) -> list[Step]:
        return [together(ranks) for ranks in zip(*self.ask("steps", count), strict=True)]

    def gradients(self, folder: Path) -> dict[str, torch.Tensor]:
        for index, pipe in enumerate(self.pipes):
            pipe.send(("gradients", (str(folder / f"{self.name}-{index}.pt"),)))
        for pipe in self.pipes:
            pipe.recv()
        parts = [torch.load(folder / f"{self.name}-{index}.pt") for index in range(len(self.pipes))]
        return {name: gradient for part in parts for name, gradient in part.items()}

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        self._signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    """torchrun's variables, one thread, equal malloc settings."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ours = {name: str(value) for name, value in {**place, **store, "OMP_NUM_THREADS": 1}.items()}
    return {**os.environ, **machine.MALLOC_SETTINGS, **ours}


def _free_port() -> int:
    """Below those that the system gives to connections: one of them could take it before the rank listens."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def started(names: list[str], task: Task) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    try:
        for name in names:
            jobs.append(Job(name, task))
            jobs[-1].ask("start")
        yield jobs
        for job in jobs:
            job.ask("stop")
    finally:
        for job in jobs:
            job.stop()


class Pace:
    """Full speed of the cores (`machine.pace_s`), as far as this run has seen it yet."""

    def __init__(self) -> None:
        self._seen_s: list[float] = []

    @property
    def best_s(self) -> float:
        """The shortest but for one in fifty: a single reading may be far too short."""
        return self._seen_s[len(self._seen_s) // 50] if self._seen_s else math.inf

    def of(self, job: Job) -> float:
        """Now, of the slowest of the job's cores."""
        paces_s = job.ask("pace")
        for pace_s in paces_s:
            bisect.insort(self._seen_s, pace_s)
        return max(paces_s)

    def wait(self, job: Job, patience_s: float) -> float:
        """Let the job wait until its cores have it, at most `patience_s`; the seconds it took."""
        begin = time.monotonic()
        while self.of(job) > machine.STEADY * self.best_s and time.monotonic() - begin < patience_s:
            pass
        return time.monotonic() - begin


def compare(
    names: list[str],
    task: Task,
    rounds: int,
    steps: int,
    patience_s: float,
    after_round: Callable[[Pace], None] = lambda _: None,
) -> list[Record]:
    """`rounds` times: each contender in turn runs `steps` steps. The first name is the yardstick."""
    with started(names, task) as jobs, tempfile.TemporaryDirectory() as folder:
        records = []
        pace = Pace()
        expected: dict[str, torch.Tensor] = {}
        for job in jobs:
            machine.wait_until_quiet(patience_s)
            record = Record(job.name, first=job.run(1)[0])
            found = job.gradients(Path(folder))
            expected = expected or found
            record.gradient_difference = largest_difference(found, expected)
            job.run(job.warm_up)
            pace.of(job)
            records.append(record)
            job.rest()
        for turn in range(rounds):
            for job, record in zip(jobs, records, strict=True):
                left_s = patience_s - machine.wait_until_quiet(patience_s)
                job.run(SETTLING)
                for _ in range(steps):
                    left_s -= pace.wait(job, left_s)
                    record.steps += job.run(1)
                job.rest()
            after_round(pace)
            for record in records:
                record.best_pace_s = pace.best_s
            kept = min(len(record.kept()) for record in records)
            print(f"round {turn + 1} of {rounds}: at least {kept} steps of each count", file=sys.stderr)
        for job, record in zip(jobs, records, strict=True):
            record.memory = job.ask("memory")
            record.plan = job.ask("call", "plan")[0]
    return records


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest |found - expected| / |expected| over the parameters (Euclidean norms).

    A gradient that is zero but for rounding (as that of a key's bias) is compared with the largest one instead:
    |expected| counts as at least `ROUNDING` of that.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())}")
    norms = {name: float(wanted.norm()) for name, wanted in expected.items()}
    least = ROUNDING * max(norms.values())
    return max(
        float((found[name] - wanted).norm()) / max(norms[name], least) for name, wanted in expected.items()
    )
