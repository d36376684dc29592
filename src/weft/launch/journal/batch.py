"""Entries in the folder of a job that a batch script started, as nothing of weft's runs beside the ranks of such a job.

python -m weft.launch.journal.batch begin FOLDER RANKS ATTEMPT     prints the folder of this attempt's logs
python -m weft.launch.journal.batch end FOLDER RANKS CODE          how it ended
python -m weft.launch.journal.batch again FOLDER RANKS CODE        the same, if it is started again
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from weft.errors import LaunchError
from weft.launch.environ import ATTEMPT
from weft.launch.journal.failure_report import failure
from weft.launch.journal.journal import Journal, attempt_folder, attempts
from weft.untrusted import whole


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    what, folder, ranks, number = _read(arguments)
    with closing(Journal(folder.absolute(), None)) as journal:
        if what == "begin":
            print(journal.begin(number, ranks, by_engine=True))
            return 0
        journal.attempt = whole(os.environ.get(ATTEMPT, "")) or 0
        found = attempts(folder)
        if number not in (0, os.EX_TEMPFAIL) and found:
            journal.fail(failure(attempt_folder(folder, found[-1]), ranks, number))
        journal.note("restart" if what == "again" else "ended", code=number)
    return 0


def _read(arguments: Sequence[str]) -> tuple[str, Path, int, int]:
    numbers = [whole(text) for text in arguments[2:]]
    if len(arguments) != 4 or arguments[0] not in ("begin", "end", "again") or None in numbers:
        raise LaunchError("give begin, end or again, the job's folder, how many ranks, and a number")
    return arguments[0], Path(arguments[1]), numbers[0] or 0, numbers[1] or 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LaunchError as error:
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(2)
