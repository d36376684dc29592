"""A step whose rows differ in length, cut by tokens and cut into equal numbers of rows: its time.

python -m benchmarks.lengths
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks import machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.lengths", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="functions in a batch")
    parser.add_argument("--longest", type=int, default=512, help="longer ones are cut off there")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=10, help="each is trained on three times")
    given = parser.parse_args()
    paths = [os.path.abspath("src"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        **machine.MALLOC_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    print(machine.machine_name(), flush=True)
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--quiet", "benchmarks/lengths/rank.py"]
    options = map(str, (given.rows, given.longest, given.microbatches, given.batches))
    sys.exit(subprocess.run([*command, *options], env=environ).returncode)


if __name__ == "__main__":
    main()
