"""make fuzz-files: reads damaged files, settings and command lines until it is stopped, or so many.

python -m tests.fuzz_files [COUNT] [--seed SEED] [--number N] [--only KIND]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.fuzz_files.run import inputs

REPORTED = 1000
"""After so many inputs there is a report."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_files")
    parser.add_argument("count", type=int, nargs="?", help="how many inputs; without end if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=0, help="with which input to begin")
    parser.add_argument("--only", default="", help="one kind of input")
    given = parser.parse_args()
    words: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    faults, began, number = 0, time.monotonic(), given.number
    with inputs(given.seed) as drawn:
        try:
            while given.count is None or number < given.number + given.count:
                outcome = drawn.run(number, given.only)
                words[outcome.word] += 1
                kinds[f"{outcome.target} {outcome.word}"] += 1
                if outcome.is_fault:
                    faults += 1
                    print(
                        f"\n===== --seed {given.seed} --number {number} --only {given.only!r}: {outcome.word}"
                    )
                    print(f"{outcome.target}: {outcome.done}\n{outcome.text}\n=====", flush=True)
                number += 1
                if number % REPORTED == 0:
                    print(f"{sum(words.values())} inputs, {faults} faults; {dict(words)}", flush=True)
        except KeyboardInterrupt:
            pass
    for kind, count in sorted(kinds.items()):
        print(f"  {count:6} {kind}")
    took = time.monotonic() - began
    print(
        f"{sum(words.values())} inputs of seed {given.seed} in {took:.0f} s, {faults} faults; {dict(words)}"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
