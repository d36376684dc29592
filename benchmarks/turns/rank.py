"""One rank of one contender: a process that runs steps when the driver asks and tells what they cost.

    python -m benchmarks.turns.rank MODULE CONTENDER TASK DRIVER_FD MEETING_FDS

Between blocks of steps it sleeps in a read, so contenders that are not at their turn use no core.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from multiprocessing.connection import Connection

import torch

from benchmarks import machine
from benchmarks.gpt import GPT, GPTConfig, next_token_loss
from benchmarks.turns.contender import Contender
from benchmarks.turns.samples import RankMemory, RankStep


class Meeting:
    """All ranks arrive before any leaves; they sleep until then. A lone rank meets nobody.

    Rank 0 has a line to each of the others, these have one to it.
    """

    def __init__(self, descriptors: list[int], first: bool) -> None:
        self.lines = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        self.first = first

    def __call__(self) -> None:
        if not self.first:
            self._tell()
        for line in self.lines:
            if not line.recv(1):
                raise ConnectionError("another rank is gone")
        if self.first:
            self._tell()

    def _tell(self) -> None:
        for line in self.lines:
            line.sendall(b".")


class Rank:
    """Obeys the driver's commands; each method below is a command, its result the reply."""

    def __init__(self, contender: Contender, meet: Meeting) -> None:
        self.contender = contender
        self.meet = meet
        self.inputs = contender.task.mini_batch()
        self.base_bytes = 0

    def start(self) -> None:
        self.contender.connect()
        _touch_library_pages()
        machine.reset_peak_rss()
        self.base_bytes = machine.rss_bytes()
        self.contender.build()

    def steps(self, count: int) -> list[RankStep]:
        seen = []
        pace_s = self.pace()
        for _ in range(count):
            before = self._snapshot()
            self.meet()
            start_s = time.monotonic()
            self.contender.step(*self.inputs)
            end_s = time.monotonic()
            after = self._snapshot()
            window_s, cpu_s, busy_s = (new - old for new, old in zip(after, before, strict=True))
            pace_before_s, pace_s = pace_s, self.pace()
            seen.append(RankStep(start_s, end_s, window_s, cpu_s, busy_s, max(pace_before_s, pace_s)))
        return seen

    def pace(self) -> float:
        """How fast this rank's core is, with the others' in use."""
        self.meet()
        return machine.pace_s()

    def _snapshot(self) -> tuple[float, float, float]:
        self.meet()
        return time.monotonic(), time.process_time(), machine.busy_s()

    def gradients(self, path: str) -> None:
        held = self.contender.held_parameters()
        found = {name: value.grad for name, value in held.items() if value.grad is not None}
        torch.save(found, path)

    def memory(self) -> RankMemory:
        held = self.contender.held_parameters().values()
        parameter_bytes = sum(value.numel() * value.element_size() for value in held)
        return RankMemory(self.base_bytes, parameter_bytes, machine.peak_rss_bytes())

    def call(self, method: str, *arguments: object) -> object:
        """What a benchmark's own contender has beside the usual commands."""
        return getattr(self.contender, method)(*arguments)

    def stop(self) -> None:
        self.contender.close()


def _touch_library_pages() -> None:
    """Train a tiny model once: the libraries' own pages are then resident and count for nobody's memory."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    next_token_loss(
        GPT(GPTConfig(blocks=1, width=32, heads=2, context=16, vocabulary=64))(ids), ids
    ).backward()


def main(module: str, name: str, task: str, driver_fd: str, meeting_fds: str) -> None:
    torch.set_num_threads(1)
    known = importlib.import_module(module)
    driver = Connection(int(driver_fd))
    meeting = Meeting([int(text) for text in meeting_fds.split(",") if text], os.environ["RANK"] == "0")
    rank = Rank(known.CONTENDERS[name](known.Task.from_text(task)), meeting)
    while True:
        try:
            command, arguments = driver.recv()
        except EOFError:
            break
        driver.send(getattr(rank, command)(*arguments))
        if command == "stop":
            break
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
