"""Runs a script as if this machine had a GPU: `emulated.py SCRIPT ARGUMENTS`."""

from __future__ import annotations

import runpy
import sys

from tests.gpu import emulated_cuda, emulated_tensors

if __name__ == "__main__":
    emulated_tensors.install()
    emulated_cuda.install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
