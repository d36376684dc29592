"""Tokens per second of a model that is split over two ranks, against one process.

python -m benchmarks.generation
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import machine
from benchmarks.first_rank import figures


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.generation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="that are generated for each prompt")
    parser.add_argument("--steps", type=int, default=3, help="that are measured in each round")
    parser.add_argument("--rounds", type=int, default=3, help="so often each contender runs, in turn")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    print(machine.machine_name(), flush=True)
    named = {name: getattr(given, name) for name in ("layers", "width", "prompts", "tokens", "steps")}
    rounds = [
        {
            number: figures("generation/rank.py", 2, named, {"microbatches": number})
            for number in given.microbatches
        }
        for _ in range(given.rounds)
    ]
    first = given.microbatches[0]
    print(
        f"\n| microbatches | tokens/s | to one process | to {first} | with new lengths | processor ms a token |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in given.microbatches:

        def median(name: str, number: int = number) -> float:
            return statistics.median(each[number][name] for each in rounds)

        gain = statistics.median(each[number]["ratio"] / each[first]["ratio"] for each in rounds)
        print(
            f"| {number} | {median('rate'):.0f} | {median('ratio'):.2f} | {gain:.2f} | {median('new_ratio'):.2f} | "
            f"{median('processor_ms'):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
