"""Ranks that live long and run one program after the other.

    this process  --source-->  server, which has imported much  --source-->  ranks, forked from it
                  <--outcome--                                   <--outcomes--

After a program that did not end well its ranks are of no use: the server forks others. One set of ranks of each
size lives at a time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
"""After so long without an answer a program counts as stuck; weft itself gives up earlier."""
WAIT_S = 150.0
"""Four ranks look for what can be split meanwhile, and the machine may be busy."""
BESIDE, LAYOUTS, KERAS = "tests.fuzz.beside", "tests.fuzz.layouts.beside", "tests.fuzz.keras.beside"
"""Modules that run a program in one process and split."""
PRECISE = {
    "torch.float32, 3e-05": "torch.float64, 1e-09",
    "torch.float32, 0.05": "torch.float64, 1e-09",
    'torch.autocast("cpu", torch.bfloat16)': 'torch.autocast("cpu", enabled=False)',
    '"float32", 0.003': '"float64", 1e-07',
}
"""Precision and tolerance, as they are written in a program, and those of double precision."""


@dataclass(frozen=True)
class Outcome:
    """`word`: one of those of `beside`; `text`: the error, or what differs."""

    word: str
    text: str

    @property
    def is_fault(self) -> bool:
        return self.word not in ("equal", "refused", "invalid")

    @property
    def reason(self) -> str:
        """The first words of a refusal, without what differs between programs."""
        return " ".join(self.text.split()[:9])


class Ranks:
    """A server of its own. `change` names a function (`module:function`) that every rank calls first, `beside` the
    module whose `outcome` runs programs."""

    def __init__(self, change: str = "", wait_s: float = WAIT_S, beside: str = BESIDE) -> None:
        environ = {name: text for name, text in os.environ.items() if not name.startswith(("WEFT_", "RANK"))}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.run", change, str(wait_s), beside],
            cwd=ROOT, env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, source: str, ranks: int) -> Outcome:
        """What becomes of a program. One that differs in lower precision, but not in double, has only rounded."""
        outcome = self._ask(source, ranks)
        if outcome.word == "differs":
            precise = source
            for lower, higher in PRECISE.items():
                precise = precise.replace(lower, higher)
            again = self._ask(precise, ranks) if precise != source else outcome
            outcome = again if again.word == "equal" else outcome
        return outcome

    def _ask(self, source: str, ranks: int) -> Outcome:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([source, ranks]) + "\n")
        self._process.stdin.flush()
        return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextlib.contextmanager
def ranks(change: str = "", wait_s: float = WAIT_S, beside: str = BESIDE) -> Iterator[Ranks]:
    """Ranks for programs, inside."""
    made = Ranks(change, wait_s, beside)
    try:
        yield made
    finally:
        made.close()


# --- in the server -------------------------------------------------------------------------------------------


class Job:
    """Ranks that were forked, and the pipes to them."""

    def __init__(self, ranks: int, folder: Path, change: str, wait_s: float, beside: str) -> None:
        from tests import warm

        self.ranks = ranks
        self.down = [os.pipe() for _ in range(ranks)]
        self.up = [os.pipe() for _ in range(ranks)]
        self.job = warm.Ranks(ranks, lambda rank: self._rank(rank, change, wait_s, beside), folder)
        for reading, _ in self.down:
            os.close(reading)
        for _, writing in self.up:
            os.close(writing)
        self.answers = [os.fdopen(reading) for reading, _ in self.up]

    def _rank(self, rank: int, change: str, wait_s: float, beside: str) -> None:
        for other, (reading, writing) in enumerate(self.down):
            os.close(writing)
            if other != rank:
                os.close(reading)
        with os.fdopen(self.down[rank][0]) as requests, os.fdopen(self.up[rank][1], "w") as answers:
            serve_rank(requests, answers, change, wait_s, beside)

    def run(self, source: str) -> tuple[Outcome, bool]:
        """The outcome, and whether these ranks can run another program."""
        request = (json.dumps(source) + "\n").encode()
        with contextlib.suppress(BrokenPipeError):
            for _, writing in self.down:
                write_all(writing, request)
        told: dict[int, tuple[str, str]] = {}
        ended: set[int] = set()
        deadline = time.monotonic() + LIMIT_S
        while len(told) + len(ended) < self.ranks and time.monotonic() < deadline:
            waiting = [n for n in range(self.ranks) if n not in told and n not in ended]
            for answer in select.select([self.answers[n] for n in waiting], [], [], 1.0)[0]:
                number, line = self.answers.index(answer), answer.readline()
                if line:
                    told[number] = tuple(json.loads(line))
                else:
                    ended.add(number)
            words = {word for word, _ in told.values()}
            if ended or words - {"equal", "differs", "invalid"}:  # who waits for that rank tells nothing
                deadline = min(deadline, time.monotonic() + (2 if words == {"refused"} else 20))
        return self._whole(told)

    def _whole(self, told: Mapping[int, tuple[str, str]]) -> tuple[Outcome, bool]:
        words = {word for word, _ in told.values()}
        if len(told) == self.ranks and len(words) == 1 and words <= {"equal", "invalid"}:
            return Outcome(*max(told.values())), True
        texts = [f"rank {rank}: {word} {text}" for rank, (word, text) in sorted(told.items())]
        if len(told) == self.ranks and words <= {"equal", "differs"}:
            return Outcome("differs", "\n".join(texts)), True
        for word in ("silent", "differs", "crashed", "stuck", "refused"):
            if word in words:
                if word == "refused":
                    return Outcome(word, next(text for which, text in told.values() if which == word)), False
                return Outcome(word, "\n".join(texts)), False
        if words == {"equal", "invalid"} and len(told) == self.ranks:
            return Outcome("crashed", "\n".join(["one process is not repeatable", *texts])), False
        return Outcome(
            "stuck" if len(told) < self.ranks else "crashed", "\n".join([*texts, self.job.text()[-6000:]])
        ), False

    def close(self) -> None:
        for _, writing in self.down:
            os.close(writing)
        for answer in self.answers:
            answer.close()
        self.job.kill()
        self.job.wait(30)
        self.job.close()


def write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]


def serve(change: str, wait_s: float, beside: str) -> None:
    """Runs the programs of standard input until it ends."""
    from tests.warm import preload

    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    preload()
    if beside == KERAS:
        preload("tensorflow")
    importlib.import_module(beside)

    gc.freeze()
    jobs: dict[int, Job] = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="weft-fuzz-") as folder:
        number = 0
        for line in sys.stdin:
            source, ranks = json.loads(line)
            if ranks not in jobs:
                number += 1
                jobs[ranks] = Job(ranks, Path(folder) / str(number), change, wait_s, beside)
            outcome, usable = jobs[ranks].run(source)
            if not usable:
                jobs.pop(ranks).close()
            answers.write(json.dumps([outcome.word, outcome.text]) + "\n")
            answers.flush()
        for job in jobs.values():
            job.close()


# --- in a rank -----------------------------------------------------------------------------------------------


def serve_rank(requests: IO[str], answers: IO[str], change: str, wait_s: float, beside: str) -> None:
    """Runs programs until one does not end well."""
    from tests.fuzz.outcomes import DIFFERS, EQUAL, INVALID

    ran = importlib.import_module(beside)
    ran.prepare()
    if change:
        module, _, name = change.partition(":")
        getattr(importlib.import_module(module), name)()
    settings: dict[str, Any] = {"wait_timeout": wait_s}
    for line in requests:
        faulthandler.dump_traceback_later(LIMIT_S - 5, exit=False)
        word, text = ran.outcome(json.loads(line), settings)
        faulthandler.cancel_dump_traceback_later()
        answers.write(json.dumps([word, text]) + "\n")
        answers.flush()
        if word not in (EQUAL, DIFFERS, INVALID):
            with contextlib.suppress(BaseException):
                if word:
                    ran.give_up(text)
            time.sleep(60)  # until the server ends it: others may still need what it holds


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), sys.argv[3])
