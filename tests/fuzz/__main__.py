"""make fuzz: runs new programs until it is stopped, or so many; prints what differs as a program that runs by itself.

python -m tests.fuzz [COUNT] [--seed SEED] [--wait SECONDS]
python -m tests.fuzz --layouts [--only NUMBER] [--ranks COUNT]    models whose layers, sequences or weights are shared
python -m tests.fuzz --keras [COUNT]                              programs for Keras
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import assume
from hypothesis.strategies import SearchStrategy

from tests.fuzz import grammar, source
from tests.fuzz.keras import grammar as keras
from tests.fuzz.keras import source as source_of_keras
from tests.fuzz.layouts import grammar as layouts
from tests.fuzz.layouts import source as source_of_layouts
from tests.fuzz.run import BESIDE, KERAS, LAYOUTS, WAIT_S, Ranks, ranks
from tests.fuzz.search import search

REPORTED = 10
"""After so many seeds there is a report."""


class FaultError(Exception):
    """A program with an outcome that must not be."""


class Batches:
    """Counts what has run."""

    def __init__(self, job: Ranks, programs: SearchStrategy[Any], written: Callable[[Any], str]) -> None:
        self.job, self.drawn, self.written = job, programs, written
        self.ran: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.faults = 0

    @property
    def programs(self) -> int:
        return sum(count for word, count in self.ran.items() if word.split()[0] in ("equal", "refused"))

    def run(self, number: int) -> None:
        """The programs that a seed gives; at a fault the smallest one is printed."""
        try:
            search(number, self.drawn, self._one)
        except FaultError as fault:
            self.faults += 1
            print(f"\n===== seed {number}\n{fault}\n=====", flush=True)

    def _one(self, program: Any) -> None:
        source = self.written(program)
        outcome = self.job.run(source, program.ranks)
        self.ran[" ".join(filter(None, [outcome.word, outcome.text if outcome.word == "equal" else ""]))] += 1
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
    parser.add_argument("--wait", type=float, default=WAIT_S, help="after how many seconds ranks are stuck")
    parser.add_argument(
        "--layouts", action="store_true", help="models whose layers, sequences or parameters ranks share"
    )
    parser.add_argument("--keras", action="store_true", help="programs for Keras")
    parser.add_argument("--only", type=int, help="of the layouts this one")
    parser.add_argument("--ranks", type=int, help="of the layouts those of so many processes")
    given = parser.parse_args()
    programs: SearchStrategy[Any] = grammar.programs
    written: Callable[[Any], str] = lambda program: source.written(program)[0]  # noqa: E731
    beside = LAYOUTS if given.layouts else KERAS if given.keras else BESIDE
    if given.keras:
        programs, written = keras.programs, source_of_keras.written
    if given.layouts:
        programs, written = layouts.programs, source_of_layouts.written
        if given.only is not None:
            programs = programs.map(lambda program: replace(program, layout=given.only))
        if given.ranks is not None:
            programs = programs.filter(lambda program: program.ranks == given.ranks)
    with ranks(wait_s=given.wait, beside=beside) as job:
        batches = Batches(job, programs, written)
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
