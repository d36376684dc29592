"""How long a sum takes between processes of one host: through shared memory, and by gloo.

python -m benchmarks.all_reduce -n 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks import machine


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.all_reduce", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("-n", type=int, default=2, help="processes")
    parser.add_argument("--most", type=float, default=256.0, help="MiB of the largest tensor")
    parser.add_argument(
        "--budget", type=float, default=400.0, help="MiB that one contender adds up for each size"
    )
    given = parser.parse_args()
    environ = {**os.environ, **machine.MALLOC_SETTINGS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft", "run", "-n", str(given.n), "benchmarks/all_reduce/rank.py"]
    print(f"{machine.machine_name()}, {given.n} processes", flush=True)
    sys.exit(subprocess.run([*command, str(given.most), str(given.budget)], env=environ).returncode)


if __name__ == "__main__":
    main()
