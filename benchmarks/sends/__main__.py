"""What a payload costs between two CPU processes of one host: through shared memory, and by gloo.

python -m benchmarks.sends
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks import machine


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sends", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="0.0625,0.25,0.5,1,4", help="MiB of a payload")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each contender, in turns")
    parser.add_argument("--trips", type=int, default=20, help="exchanges in a block")
    given = parser.parse_args()
    paths = [os.path.abspath("src"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ,
        **machine.MALLOC_SETTINGS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "benchmarks/sends/rank.py"]
    print(machine.machine_name(), flush=True)
    options = [given.sizes, str(given.rounds), str(given.trips)]
    sys.exit(subprocess.run([*command, *options], env=environ).returncode)


if __name__ == "__main__":
    main()
