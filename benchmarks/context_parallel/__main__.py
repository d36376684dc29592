"""A step whose sequences are sharded over ranks, by both exchanges of attention: memory and time.

python -m benchmarks.context_parallel
python -m benchmarks.context_parallel --kinds windows convolutions scans --keys 8
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

from benchmarks import machine
from benchmarks.first_rank import GIVES_BACK, figures


def contenders(ranks: int, kind: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Processes and settings by name."""
    sharded = {"context_parallel_degree": ranks}
    if kind != "attention":
        return {"one process": (1, {}), "sharded": (ranks, sharded)}
    return {
        "one process": (1, {}),
        **{
            name.replace("_", "-"): (ranks, {**sharded, "context_parallel_attention": name})
            for name in ("all_gather", "all_to_all")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--keys", type=int, nargs="+", default=[8, 2], help="heads of keys and values")
    parser.add_argument("--kinds", nargs="+", default=["attention"], help="or windows, convolutions, scans")
    parser.add_argument("--positions", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    print(machine.machine_name(), flush=True)
    print("\n| layers | positions | heads of keys | by | peak of a step MiB | step ms | to one process |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for kind, positions, keys in itertools.product(given.kinds, given.positions, given.keys):
        options = {name: getattr(given, name) for name in ("layers", "width", "heads", "steps")}
        options |= {"positions": positions, "keys": keys, "kind": kind}
        runs = {
            name: partial(figures, "context_parallel/rank.py", ranks, options, settings)
            for name, (ranks, settings) in contenders(given.ranks, kind).items()
        }
        peaks = {name: run(**GIVES_BACK)["peak"] for name, run in runs.items()}
        steps = [{name: run()["step_ms"] for name, run in runs.items()} for _ in range(given.rounds)]
        for name, peak in peaks.items():
            step_ms = statistics.median(each[name] for each in steps)
            ratio = statistics.median(each[name] / each["one process"] for each in steps)
            print(
                f"| {kind} | {positions} | {keys} | {name} | {peak:.0f} | {step_ms:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
