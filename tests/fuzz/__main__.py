"""make fuzz: runs new programs until it is stopped, or so many; prints what differs as a program that runs by itself.

python -m tests.fuzz [COUNT] [--seed SEED] [--wait SECONDS]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter

from hypothesis import assume

from tests.fuzz.grammar import Program
from tests.fuzz.run import Ranks, ranks
from tests.fuzz.search import search
from tests.fuzz.source import written

REPORTED = 10
"""After so many seeds there is a report."""


class FaultError(Exception):
    """A program with an outcome that must not be."""


class Batches:
    """Counts what has run."""

    def __init__(self, job: Ranks) -> None:
        self.job = job
        self.ran: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.faults = 0

    @property
    def programs(self) -> int:
        return self.ran["equal"] + self.ran["refused"]

    def run(self, number: int) -> None:
        """The programs that a seed gives; at a fault the smallest one is printed."""
        try:
            search(number, self._one)
        except FaultError as fault:
            self.faults += 1
            print(f"\n===== seed {number}\n{fault}\n=====", flush=True)

    def _one(self, program: Program) -> None:
        source, _ = written(program)
        outcome = self.job.run(source, program.ranks)
        self.ran[outcome.word] += 1
        if outcome.word == "refused":
            self.reasons[outcome.reason] += 1
        assume(outcome.word != "invalid")
        if outcome.is_fault:
            raise FaultError(f"{source}\n# {outcome.word}:\n# " + outcome.text.replace("\n", "\n# "))

    def report(self) -> str:
        refused = "".join(f"\n  {count:5} {reason} ..." for reason, count in self.reasons.most_common())
        return f"{self.programs} programs, {self.faults} faults; {dict(self.ran)}; refused:{refused}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("count", type=int, nargs="?", help="how many programs; without end if not given")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--wait", type=float, default=20.0, help="after how many seconds ranks are stuck")
    given = parser.parse_args()
    with ranks(wait_s=given.wait) as job:
        batches = Batches(job)
        number = given.seed
        try:
            while given.count is None or batches.programs < given.count:
                batches.run(number)
                number += 1
                if (number - given.seed) % REPORTED == 0:
                    print(batches.report(), flush=True)
        except KeyboardInterrupt:
            pass
        print(batches.report())
    return bool(batches.faults)


if __name__ == "__main__":
    sys.exit(main())
