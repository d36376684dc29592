"""Starts a rank's script under weft, and reads the figures that its first rank prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Free memory goes back to the system at once, so that what is resident is what lives; this takes time."""


def figures(
    script: str, ranks: int, options: Mapping[str, Any], settings: Mapping[str, Any], **environ: str
) -> dict[str, float]:
    """The figures in the line `figures {...}` of the first rank. ``environ``: more variables of the ranks."""
    paths = [os.path.abspath("src"), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "WEFT_SET": json.dumps(settings),
        **environ,
    }  # fmt: skip
    command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), f"benchmarks/{script}"]
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run([*command, *arguments], env=variables, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("figures "):
            found: dict[str, float] = json.loads(line.removeprefix("figures "))
            return found
    sys.exit(f"{done.stdout}\n{done.stderr}")
