"""Runs a command as on another host: with a name and a clock of its own. Linux, as root.

python -m tests.planted.elsewhere NAME MILLISECONDS COMMAND ...
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from pathlib import Path

CLONE_NEWTIME, CLONE_NEWUTS = 0x80, 0x04000000


def main() -> int:
    name, milliseconds, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    for flag in (CLONE_NEWUTS, CLONE_NEWTIME):
        if libc.unshare(flag) != 0:
            raise OSError(ctypes.get_errno(), f"no namespace {flag:#x}: {os.strerror(ctypes.get_errno())}")
    socket.sethostname(name)
    # It holds for processes that are started from now on.
    Path("/proc/self/timens_offsets").write_text(f"monotonic 0 {int(milliseconds) * 1_000_000}\n")
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
