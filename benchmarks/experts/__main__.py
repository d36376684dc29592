"""Memory and time of a step of a mixture of experts: whole on each of two replicas, or shared by them.

python -m benchmarks.experts
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks import machine
from benchmarks.first_rank import GIVES_BACK, figures

CONTENDERS: dict[str, dict[str, Any]] = {
    "whole on each replica": {},
    "shared by two replicas": {"expert_parallel_degree": 2},
    "shared by two tensor-parallel ranks": {
        "tensor_parallel_degree": 2, "experts": "expert_parallel", "inputs": "per_rank",
    },
}  # fmt: skip
"""The settings of two ranks, each of which reads other samples."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.experts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16, help="of each layer; a token goes to two")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank and step")
    parser.add_argument("--steps", type=int, default=6, help="that are measured in each round")
    parser.add_argument("--rounds", type=int, default=3, help="so often each contender runs, in turn")
    given = parser.parse_args()
    print(machine.machine_name(), flush=True)
    for kind in ("modules", "one weight"):
        options = {"kind": kind, **{name: value for name, value in vars(given).items() if name != "rounds"}}
        run = partial(figures, "experts/rank.py", 2, options)
        memory = {name: run(settings, **GIVES_BACK) for name, settings in CONTENDERS.items()}
        steps = [
            {name: run(settings)["step_ms"] for name, settings in CONTENDERS.items()}
            for _ in range(given.rounds)
        ]
        print(f"\nexperts that are {kind}\n")
        print("| experts | parameters MiB | peak of a step MiB | step ms | to the first row |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, found in memory.items():
            step_ms = statistics.median(each[name] for each in steps)
            ratio = statistics.median(each[name] / each["whole on each replica"] for each in steps)
            print(
                f"| {name} | {found['held']:.0f} | {found['peak']:.0f} | {step_ms:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
