"""make faults: the table of faults, all of it or some rows.

python -m tests.fault.matrix [--only TEXT ...] [--results FILE] [--write] [--list]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.fault.matrix import page
from tests.fault.matrix.strike import strike, why_not
from tests.fault.matrix.table import Row, rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.matrix")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose name has this text (each of them)"
    )
    parser.add_argument(
        "--results", type=Path, help="a file of results; rows that passed before are not run again"
    )
    parser.add_argument("--write", action="store_true", help="write the table of tests/README.md")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    given = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # hosts and disks go with the program
    known = read(given.results) if given.results else {}
    chosen = [row for row in rows() if all(text in str(row) for text in given.only)]
    for row in chosen:
        if given.list:
            print(row)
        elif known.get(row, ("not run", None))[0]:
            reason = why_not(row)
            if reason:
                print(f"skipped  {row}: {reason}", flush=True)
                continue
            began = time.monotonic()
            found = strike(row)
            known[row] = (found.problem, found.seconds)
            gone = "" if found.seconds is None else f", gone after {found.seconds:.1f} s"
            print(
                f"{'FAILED' if found.problem else 'ok':7}  {row}{gone} ({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if found.problem:
                print(f"    {found.problem}\n{found.said}\n    -----", flush=True)
            if given.results:
                keep(given.results, row, known[row])
    if given.write:
        page.write({row: known[row] for row in rows() if row in known})
    bad = [row for row in chosen if known.get(row, ("", None))[0]]
    if not given.list:
        print(f"{len(chosen)} rows, {len(bad)} failed")
    return bool(bad)


def read(path: Path) -> dict[Row, tuple[str, float | None]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {Row(**found["row"]): (found["problem"], found["seconds"]) for found in map(json.loads, lines)}


def keep(path: Path, row: Row, result: tuple[str, float | None]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"row": asdict(row), "problem": result[0], "seconds": result[1]}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
