"""Memory and time of a step of a mixture of experts: whole on each of two replicas, or shared by them.

python -m benchmarks.experts
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import machine

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
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
        for _ in range(given.rounds):
            for name, settings in CONTENDERS.items():
                found[name].append(run(settings, kind, given))
        first = found["whole on each replica"]
        print(f"\nexperts that are {kind}\n")
        print("| experts | parameters MiB | peak of a step MiB | step ms | to the first row |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for name, rows in found.items():
            ratio = statistics.median(a["step_ms"] / b["step_ms"] for a, b in zip(rows, first, strict=True))
            held, peak, step_ms = (
                statistics.median(row[key] for row in rows) for key in ("held", "peak", "step_ms")
            )
            print(f"| {name} | {held:.0f} | {peak:.0f} | {step_ms:.0f} | {ratio:.2f} |", flush=True)


def run(settings: dict[str, Any], kind: str, given: argparse.Namespace) -> dict[str, float]:
    """The figures of the first rank."""
    paths = [os.path.abspath("src"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environ["WEFT_SET"] = json.dumps(settings)
    options = [
        f"--{name}={getattr(given, name)}" for name in ("layers", "width", "experts", "tokens", "steps")
    ]
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "benchmarks/experts/rank.py", f"--kind={kind}"]
    done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("figures "):
            found: dict[str, float] = json.loads(line.removeprefix("figures "))
            return found
    sys.exit(f"{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
