"""Runs all jobs and prints the table of what was planted and what was found.

python -m tests.planted [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.planted.jobs import JOBS, faults, found_in
from weft.rules.rule import FOUND


def main() -> int:
    wrong = 0
    print("| planted | verdict | under it | right |\n| --- | --- | --- | --- |")
    for name, planted in JOBS.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            planted.run(Path(folder) / "out")
            told = found_in(Path(folder) / "out")
        bad = faults(planted, told)
        wrong += bool(bad)
        first = told.finding.rule if told.finding is not None else "-"
        rest = ", ".join(
            f"{each.rule} ({each.status.value})"
            for each in told.findings
            if each.status in FOUND and each.rule != first
        )
        print(f"| {name} | {first} | {rest} | {'yes' if not bad else 'no'} |", flush=True)
        for line in bad:
            print(f"  {line}", file=sys.stderr, flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
