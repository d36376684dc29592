"""What a step takes of memory where replicas of a pipeline share parameters, and when these are gathered.

python -m benchmarks.shared_parameters
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import machine

CONTENDERS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "for the step": {"sharded_data_parallel_degree": 2},
    "for each microbatch": {"sharded_data_parallel_degree": 2, "sharded_parameters_gathered": "microbatch"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.shared_parameters", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=16, help="two square matrices each")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    given = parser.parse_args()
    print(machine.machine_name(), flush=True)
    print("| parameters are whole | of a partition MiB | between steps MiB | peak of a step MiB | step ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, settings in CONTENDERS.items():
        found = run(settings, given)
        print(
            f"| {name} | {found['whole']:.0f} | {found['rest']:.0f} | {found['peak']:.0f} | {found['step_ms']:.0f} |",
            flush=True,
        )


def run(settings: dict[str, Any], given: argparse.Namespace) -> dict[str, float]:
    """The figures of rank 0."""
    paths = [os.path.abspath("src"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environ |= {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }  # what is free goes back at once
    environ["WEFT_SET"] = json.dumps(settings)
    command = [sys.executable, "-m", "weft", "run", "-n", "4", "benchmarks/shared_parameters/rank.py"]
    options = ["--layers", str(given.layers), "--width", str(given.width), "--steps", str(given.steps)]
    done = subprocess.run([*command, *options], env=environ, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("figures "):
            found: dict[str, float] = json.loads(line.removeprefix("figures "))
            return found
    sys.exit(f"{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
