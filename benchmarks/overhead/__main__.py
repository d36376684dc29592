"""What weft costs where it has nothing to split: one process and one partition against a plain loop.

    python -m benchmarks.overhead --steps 40

glibc and OpenMP read their settings when a process starts, so this starts the program that measures.
"""

import os
import sys

from benchmarks import machine

environment = {**os.environ, **machine.MALLOC_SETTINGS, "OMP_NUM_THREADS": "1"}
command = [sys.executable, "-m", "benchmarks.overhead.measure", *sys.argv[1:]]
os.execve(sys.executable, command, environment)
