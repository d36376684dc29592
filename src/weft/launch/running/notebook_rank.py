"""One rank of `weft.launch.running.notebook`: calls the function, and on rank 0 leaves what it returns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from weft.launch.running.notebook import JOB, RESULT, cloudpickle, give_sources, pack


def main() -> None:
    folder = Path(sys.argv[1])
    function, arguments, given = cloudpickle().loads((folder / JOB).read_bytes())
    give_sources(function, given)
    found = function(*arguments)
    if os.environ["RANK"] == "0":
        written = folder / f"{RESULT}.part"
        written.write_bytes(pack(found, f"what {getattr(function, '__name__', 'the function')} returns"))
        written.rename(folder / RESULT)


if __name__ == "__main__":
    main()
