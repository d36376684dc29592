"""What a step takes of memory where replicas of a pipeline share parameters, and when these are gathered.

python -m benchmarks.shared_parameters
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks import machine
from benchmarks.first_rank import GIVES_BACK, figures

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
        found = figures("shared_parameters/rank.py", 4, vars(given), settings, **GIVES_BACK)
        print(
            f"| {name} | {found['whole']:.0f} | {found['rest']:.0f} | {found['peak']:.0f} | {found['step_ms']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
