"""``weft-python``: Python, with the names of ``smdistributed`` on its path.

SM_HP_MP_PARAMETERS='{"partitions": 2}' mpirun -np 4 weft-python script.py
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from weft.compat.enable import launch_environ
from weft.errors import WeftError


def main() -> NoReturn:
    """Becomes ``python`` with the same arguments."""
    arguments = sys.argv[1:]
    try:
        added = launch_environ(os.environ, arguments)
    except WeftError as error:
        print(f"weft-python: error: {error}", file=sys.stderr)
        sys.exit(2)
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **added})


if __name__ == "__main__":
    main()
