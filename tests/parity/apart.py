"""Runs a script as if each rank had a host of its own: `apart.py SCRIPT ARGUMENTS`.

Ranks of one host share memory: their headers go through pipes. Across hosts, and on GPUs, all goes through gloo.
"""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    from weft.transport import segment

    segment.host_number = os.getpid
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
